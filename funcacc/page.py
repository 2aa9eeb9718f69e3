"""A report as HTML: one fragment without scripts, pictures or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = {
    "params": "#0072b2",
    "optimizer state": "#56b4e9",
    "buffers": "#009e73",
    "key and numbers": "#999999",
    "captured constants": "#cc79a7",
    "window": "#e69f00",
    "accumulators": "#d55e00",
    "inputs": "#3b6fb6",
    "temporaries": "#d98032",
    "outputs": "#7a7a7a",
    "constants": "#b08bb5",
}

STYLE = """
.funcacc { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; }
.funcacc h2 { font-size: 1.15em; margin: 1.6em 0 .5em; }
.funcacc p { margin: .4em 0; max-width: 46em; }
.funcacc .total { display: flex; justify-content: space-between; margin-top: .7em; }
.funcacc .bar { display: flex; height: 1.6em; background: #f0f0f0;
  margin-bottom: .8em; }
.funcacc .bar i { display: block; box-shadow: inset -1px 0 #fff; min-width: 1px; }
.funcacc .key { display: inline-block; width: .8em; height: .8em; margin-right: .5em; }
.funcacc .wide { overflow-x: auto; }
.funcacc table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.funcacc th, .funcacc td { text-align: left; padding: .2em 1.1em .2em 0; white-space: nowrap;
  border-bottom: 1px solid #e4e4e4; }
.funcacc th { color: #555; font-weight: 600; }
.funcacc td.n, .funcacc th.n { text-align: right; }
.funcacc code { font: .92em ui-monospace, monospace; }
.funcacc input { font: inherit; width: 100%; max-width: 24em; padding: .3em .5em;
  margin: .3em 0 .6em; border: 1px solid #999; border-radius: 3px; box-sizing: border-box; }
.funcacc .no { color: #b00020; font-weight: 600; }
.funcacc .leaves { font-size: .88em; }
"""

_FILTER = (
    "const t = this.value.toLowerCase(), b = this.closest('section').querySelector('.leaves'); "
    "let n = 0; for (const r of b.rows) { r.hidden = !r.textContent.toLowerCase().includes(t); "
    "n += !r.hidden } this.nextElementSibling.textContent = n + ' of ' + b.rows.length + ' leaves'"
)


def size(n: int) -> str:
    """Bytes for people, e.g. ``1.5 MiB``."""
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{n} B"


def fragment(report: Mapping[str, Any]) -> str:
    """What `Report.to_dict` gave, as one ``<section>``.

    Raises:
        KeyError: for another dict; so do TypeError, ValueError and AttributeError.
    """
    return "\n".join(
        [
            f'<section class="funcacc"><style>{STYLE}</style>',
            _summary(report),
            _memory(report),
            _builds(report["builds"]),
            _leaves(report),
            "</section>",
        ]
    )


def _summary(report: Mapping[str, Any]) -> str:
    state, donated = int(report["state_leaves"]), int(report["donated_leaves"])
    lines = [
        f"Engine {escape(report['engine'])}: {int(report['compiles'])} program(s) compiled, "
        f"{int(report['traces'])} trace(s) of the loss.",
        f"State: {state} leaves, {size(int(report['state_bytes']))}; donated: {donated} leaves, "
        f"{size(int(report['donated_bytes']))}"
        + ("." if report["mesh"] else f"; found in place: {int(report['in_place_leaves'])}."),
    ]
    if report["mesh"]:
        each = size(int(report["device_state_bytes"]))
        lines.append(f"Mesh {escape(report['mesh'])}: {each} of state on each device.")
    return "<h2>Summary</h2>" + "".join(f"<p>{line}</p>" for line in lines)


# Memory --------------------------------------------------------------------------------


def _memory(report: Mapping[str, Any]) -> str:
    kinds = {k: int(n) for k, n in report["kinds"].items()}
    floor, need = int(report["floor_bytes"]), report["need"]
    parts = {}
    if need is not None:
        parts = {k: int(n) for k, n in need.items() if k != "total"}
    most = max(floor, sum(parts.values()), 1)
    bars = _bar("the floor", kinds, most)
    if parts:
        bars += _bar("the program", parts, most)
    where = " on each device" if report["mesh"] else ""
    text = (
        "<p>The floor is what a step can't do without: its state, what it reads, the window, and "
        "one accumulator for each trained parameter. Activations of one microbatch and results "
        "come on top of it.</p>"
    )
    if parts:
        text += (
            "<p>The program's own bar is what the compiler has assigned; its temporaries "
            "contain accumulators and activations.</p>"
        )
    else:
        text += "<p>What the compiler has assigned wasn't asked for, or it doesn't tell.</p>"
    counts = [x["kind"] for x in (*report["leaves"], *report["inside"])]
    rows: list[tuple[str, int | None, int]]
    rows = [(k, counts.count(k), n) for k, n in kinds.items()]
    rows += [(k, None, n) for k, n in parts.items()]
    return (
        f"<h2>Memory{where}</h2>{bars}{text}"
        '<div class="wide"><table><thead><tr><th>kind<th class="n">leaves<th class="n">bytes'
        f"</thead><tbody>{''.join(map(_kind_row, rows))}</tbody></table></div>"
    )


def _kind_row(row: tuple[str, int | None, int]) -> str:
    kind, count, nbytes = row
    name = escape(kind) if count is not None else f"program: {escape(kind)}"
    return (
        f"<tr><td>{_key(kind)}{name}<td class='n'>{'' if count is None else count}"
        f"<td class='n'>{size(nbytes)}"
    )


def _key(kind: str) -> str:
    return f'<span class="key" style="background:{COLOURS.get(kind, "#444")}"></span>'


def _bar(name: str, parts: Mapping[str, int], most: int) -> str:
    pieces = "".join(
        f'<i style="width:{100 * n / most:.3f}%;background:{COLOURS.get(k, "#444")}" '
        f'title="{escape(k)}: {size(n)}"></i>'
        for k, n in parts.items()
        if n
    )
    total = size(sum(parts.values()))
    return (
        f'<div class="total"><span>{name}</span><span>{total}</span></div>'
        f'<div class="bar">{pieces}</div>'
    )


# Tables --------------------------------------------------------------------------------


def _builds(builds: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td class='n'>{i}<td class='n'>{int(b['step'])}<td>{escape(b['reason'])}"
        f"<td>{'traced' if b['traced'] else 'found traced'}"
        + "".join(
            f"<td class='n'>{float(b['seconds'].get(k, 0)):.2f} s"
            for k in ("capture", "lower", "compile")
        )
        for i, b in enumerate(builds, 1)
    )
    return (
        '<h2>Programs</h2><div class="wide"><table><thead><tr><th class="n">'
        '<th class="n">after step<th>reason<th>loss<th class="n">capture'
        '<th class="n">lower<th class="n">compile</thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _leaves(report: Mapping[str, Any]) -> str:
    mesh = bool(report["mesh"])
    leaves, inside = report["leaves"], report["inside"]
    rows = [_leaf(x, mesh, _fate(x)) for x in leaves]
    rows += [_leaf(x, mesh, "inside the loop") for x in inside]
    where = '<th>lies<th class="n">on each device' if mesh else ""
    return (
        "<h2>Leaves</h2><label>Filter by any word in a row: "
        f'<input type="search" oninput="{escape(_FILTER)}"><span></span></label>'
        '<div class="wide"><table><thead><tr><th>path<th>kind<th>dtype and shape<th class="n">bytes'
        f'{where}<th>buffer</thead><tbody class="leaves">{"".join(rows)}</tbody></table></div>'
    )


def _leaf(x: Mapping[str, Any], mesh: bool, fate: str) -> str:
    where = ""
    if mesh:
        where = f"<td>{escape(x['placement'])}<td class='n'>{size(int(x['device_bytes']))}"
    return (
        f"<tr><td><code>{escape(x['path'])}</code><td>{_key(x['kind'])}{escape(x['kind'])}"
        f"<td><code>{escape(x['spec'])}</code><td class='n'>{size(int(x['bytes']))}{where}"
        f"<td>{fate}"
    )


def _fate(x: Mapping[str, Any]) -> str:
    if not x["donated"]:
        return "kept"
    places = {True: ", in place", False: ', <span class="no">moved</span>'}
    return f"donated to output {int(x['output'])}{places.get(x['in_place'], '')}"
