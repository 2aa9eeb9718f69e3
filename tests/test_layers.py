"""Imports go one way: each file imports only from the lines above it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "funcacc"

ORDER = [
    "types",
    "placement",
    "errors",
    "guard",
    "trees",
    "files",
    "parts",
    "rng",
    "batches",
    "loss",
    "losses",
    "page",
    "report",
    "capture.graph",
    "capture.ops",
    "capture.cut",
    "capture.batch_norm",
    "capture.random",
    "capture.remat",
    "capture.context",
    "capture.passes",
    "capture.decompositions",
    "capture.rows",
    "capture.open_sums",
    "capture.open_loops",
    "capture.early",
    "capture.mutation",
    "capture.trace",
    "capture.numbers",
    "watch",
    "attributes",
    "model",
    "inspection",
    "optimizers.asked",
    "optimizers.shadow",
    "optimizers.update",
    "optimizers.creation",
    "optimizers.rules",
    "optimizers.allowed",
    "optimizers.groups",
    "optimizers.places",
    "optimizers.torch_optim",
    "optimizers.functional",
    "optimizers",
    "engines.base",
    "engines.pairs",
    "engines.dump",
    "engines.eager",
    "engines.xla.private",
    "engines.xla.slots",
    "engines.xla.account",
    "engines.xla.mesh",
    "engines.xla.hlo",
    "engines.xla.marks",
    "engines.xla.natives",
    "engines.xla.unmerged",
    "engines.xla.wide",
    "engines.xla.lower",
    "engines.xla.planners",
    "engines.xla",
    "engines.jax.elementwise",
    "engines.jax.shapes",
    "engines.jax.reductions",
    "engines.jax.products",
    "engines.jax.lower",
    "engines.jax.expand",
    "engines.jax.memory",
    "engines.jax",
    "engines",
    "plan",
    "reading",
    "carries",
    "open_loop",
    "host",
    "trips",
    "counted",
    "loops",
    "remat",
    "layers",
    "stages",
    "jit",
    "default_loss",
    "microbatch",
    "accumulate",
    "state",
    "options",
    "step",
    "account",
    "programs",
    "failures",
    "dispatch",
    "calls",
    "several",
    "train",
    "misfits",
    "saving",
    "one_line",
    "gradients",
    "shard_files",
    "shards",
    "sharding",
    "integrations.transformers",
    "integrations",
    "",
    "cli",
]

# The command; its modules may import one another.
SHELL = ("cli", "bench")


def layer(module: str) -> int:
    name = module.removeprefix("funcacc").lstrip(".")
    if name.startswith(SHELL):
        return ORDER.index("cli")
    while name not in ORDER:
        name = name.rpartition(".")[0]
    return ORDER.index(name)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("funcacc"):
            children = [f"{node.module}.{a.name}" for a in node.names]
            as_file = {c: PACKAGE.parent / Path(*c.split(".")) for c in children}
            modules = [c for c, p in as_file.items() if p.with_suffix(".py").exists() or p.is_dir()]
            found += modules if len(modules) == len(children) else [node.module, *modules]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("funcacc")]
    return found


def test_imports_go_one_way():
    wrong = [
        f"{module_name(path)} imports {target}"
        for path in PACKAGE.rglob("*.py")
        for target in imported(path)
        if layer(target) > layer(module_name(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_has_its_place():
    modules = {module_name(p).removeprefix("funcacc").lstrip(".") for p in PACKAGE.rglob("*.py")}
    placed = {m for m in modules if m in ORDER or m.startswith(SHELL) or m == "capture"}
    assert modules == placed


def test_only_trees_names_optree_and_only_one_folder_names_torch_xla():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.name != "trees.py":
            assert "import optree" not in text, path
        if "_XLAC" in text or "_C._xla" in text:
            assert path.parent == PACKAGE / "engines" / "xla", path
