"""Windows: stacking, splitting, tails and refusals."""

import threading
import traceback

import numpy as np
import pytest
import torch
from torch import nn

import funcacc
from funcacc.batches import as_window


def test_stack_keeps_structure_and_takes_numpy():
    window = funcacc.stack([{"b": np.full((2,), i), "a": (torch.ones(1), None)} for i in range(3)])
    assert list(window.tree) == ["b", "a"]
    assert window.tree["b"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert window.tree["a"][1] is None
    assert (window.capacity, window.count) == (3, 3)


def test_windows_keep_the_tail():
    made = list(funcacc.windows([torch.tensor([float(i)]) for i in range(10)], 4))
    assert [w.count for w in made] == [4, 4, 2]
    assert [w.capacity for w in made] == [4, 4, 4]
    assert made[2].tree.flatten().tolist() == [8, 9, 0, 0]


def test_split_covers_all_rows_once():
    window = funcacc.split(torch.arange(6), 3)
    assert window.tree.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("batch", [torch.ones(3), {"x": torch.ones(3)}, (torch.ones(3),)])
def test_one_batch_is_not_guessed_to_be_a_window(batch):
    with pytest.raises(funcacc.FuncaccError, match=r"write \[batch\].*funcacc\.split\(batch, n\)"):
        as_window(batch)


@pytest.mark.parametrize("rows, n", [(10, 4), (2, 4), (0, 4)])
def test_split_names_both_numbers(rows, n):
    with pytest.raises(funcacc.FuncaccError, match=rf"has {rows} rows.*into {n} microbatches"):
        funcacc.split({"x": torch.zeros(rows, 1)}, n)


@pytest.mark.parametrize("n", [0, -1, 2.5])
def test_split_into_no_number_names_both(n):
    with pytest.raises(
        funcacc.FuncaccError, match=rf"num_microbatches, for batch of 10 rows, is {n}"
    ):
        funcacc.split(torch.zeros(10, 1), n)


READ_ONLY = np.frombuffer(bytes(range(4)), np.uint8)
ARRAYS = {
    "scalar": (np.float32(3), torch.tensor(3.0)),
    "0-d": (np.array(3), torch.tensor(3)),
    "read-only": (READ_ONLY, torch.arange(4, dtype=torch.uint8)),
    "big-endian": (np.arange(3, dtype=">f4"), torch.arange(3.0)),
    "reversed": (np.arange(3)[::-1], torch.tensor([2, 1, 0])),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_of_any_kind(name):
    array, wanted = ARRAYS[name]
    made = funcacc.stack([array, array]).tree
    assert (made.dtype, made.shape) == (wanted.dtype, (2, *wanted.shape))
    assert torch.equal(made[1], wanted)


@pytest.mark.parametrize("dtype", [object, "U3", np.longdouble, [("a", "f4")], "M8[s]"])
def test_arrays_that_are_no_tensors_are_refused(dtype):
    with pytest.raises(funcacc.FuncaccError, match=r"microbatch\[0\]\['x'\] is a NumPy array of"):
        funcacc.stack([{"x": np.zeros(2, dtype)}])


def mean_of(engine, window):
    model = nn.Linear(1, 1, bias=False).to(funcacc.device(engine))
    with torch.no_grad():
        model.weight.fill_(1.0)
    return funcacc.accumulate(model, window, lambda m, b: m(b["x"]).mean()).loss.item()


@pytest.mark.parametrize("count", [2, np.int64(2), torch.tensor(2)])
def test_a_window_of_numpy_arrays(engine, count):
    tree = {"x": np.array([[[1.0]], [[3.0]], [[9.0]]], np.float32), "none": None}
    assert mean_of(engine, funcacc.Window(tree, count)) == 2.0


X = torch.zeros(3, 4)
REFUSED = {
    "too many": (funcacc.Window(X, np.int64(7)), "count is 7, but its capacity is 3"),
    "too many, a tensor": (funcacc.Window(X, torch.tensor(7)), "count is 7.*1 <= count <= 3"),
    "none": (funcacc.Window(X, torch.tensor(0)), "count is 0, but its capacity is 3"),
    "a float": (funcacc.Window(X, 1.5), "count is 1.5; give an int"),
    "a floating tensor": (
        funcacc.Window(X, torch.tensor(1.0)),
        r"count is float32\[\]; give an int",
    ),
    "counts": (funcacc.Window(X, torch.tensor([1])), r"count is int64\[1\]; give an int"),
    "text": (funcacc.Window({"x": X, "s": "ab"}, 1), r"window\['s'\] is a str"),
    "0-d": (funcacc.Window({"x": X, "n": torch.tensor(1)}, 1), r"window\['n'\] is 0-d"),
    "axes": (funcacc.Window({"x": X, "y": X[:2]}, 1), r"window\['x'\]: 3, window\['y'\]: 2"),
    "windows": ([funcacc.Window(X)], r"microbatch\[0\] is a Window.*pass one window"),
    "a loader": (torch.utils.data.DataLoader(X), "DataLoader; pass the microbatches of one step"),
    "no values": (
        [X, X.to("meta")],
        r"microbatch\[1\] is on the meta device, without values; give",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    batches, message = REFUSED[name]
    with pytest.raises(funcacc.FuncaccError, match=message):
        as_window(batches)


def test_disagreements_name_microbatch_leaf_and_both_shapes():
    rows = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(1, 3)}]
    with pytest.raises(funcacc.FuncaccError) as e:
        funcacc.stack(rows)
    assert "microbatch[1]['x'] is float32[1,3]" in str(e.value)
    assert "in microbatch[0] it is float32[2,3]" in str(e.value)
    with pytest.raises(funcacc.FuncaccError, match=r"microbatch\[1\]\['y'\] is new"):
        funcacc.stack([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}])


def test_empty_windows_and_strings_are_refused():
    with pytest.raises(funcacc.FuncaccError, match="0 microbatches"):
        funcacc.stack([])
    with pytest.raises(funcacc.FuncaccError, match="size is 0"):
        funcacc.windows([], 0)
    with pytest.raises(funcacc.FuncaccError, match=r"microbatch\[0\]\['s'\] is a str"):
        funcacc.stack([{"s": "text"}])
    with pytest.raises(funcacc.FuncaccError, match=r"count is 5.*capacity is 2"):
        as_window(funcacc.Window(torch.zeros(2, 1), 5))


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("funcacc-windows")]


def numbered(n, seen=None):
    for i in range(n):
        if seen is not None:
            seen.append((i, threading.current_thread().name))
        yield torch.tensor([float(i)])


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_reading_ahead_keeps_the_order_and_leaves_no_thread(prefetch):
    seen = []
    made = list(funcacc.windows(numbered(10, seen), 4, prefetch=prefetch))
    assert [w.tree.flatten().tolist()[: w.count] for w in made] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    ahead = {name.startswith("funcacc-windows") for _, name in seen}
    assert ahead == {prefetch > 0}
    assert not reading_threads()


def test_reading_ahead_is_limited():
    seen = []
    reader = funcacc.windows(numbered(100, seen), 2, prefetch=2)
    next(reader)
    reader.close()
    assert len(seen) <= 2 * (2 + 2)
    assert not reading_threads()


def test_leaving_the_loop_early_leaves_no_thread():
    for _ in funcacc.windows(numbered(100), 2):
        break
    assert not reading_threads()


def test_the_loaders_exception_comes_with_its_own_traceback():
    def broken():
        yield from numbered(3)
        raise KeyError("sample 3")

    reader = funcacc.windows(broken(), 2)
    assert next(reader).count == 2
    with pytest.raises(KeyError, match="sample 3") as caught:
        next(reader)
    assert "in broken" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not reading_threads()


def test_windows_are_moved_to_the_device(engine):
    device = funcacc.device(engine)
    (window,) = funcacc.windows([{"x": torch.ones(2)}, {"x": torch.zeros(2)}], 2, device=device)
    assert window.tree["x"].device == device
    assert window.tree["x"].cpu().tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    "size, prefetch, message",
    [
        (0, 2, "the window size is 0; give a whole number, at least 1"),
        (2.5, 2, "the window size is 2.5; give a whole number, at least 1"),
        (2, -1, "prefetch is -1; give a whole number, at least 0"),
    ],
)
def test_impossible_sizes_are_refused_at_once(size, prefetch, message):
    with pytest.raises(funcacc.FuncaccError, match=message):
        funcacc.windows([], size, prefetch=prefetch)


def pending(tensor):
    """Whether a device tensor waits for a sync to get its buffer."""
    import torch_xla

    return "XLAData: None" in torch_xla._XLAC._get_xla_tensor_debug_info(tensor)


@pytest.mark.xla
def test_the_reading_thread_leaves_nothing_pending_on_xla():
    """What is pending in one thread is taken up by a sync in another, halfway."""
    device = funcacc.device("xla")
    (window,) = funcacc.windows([torch.ones(2)], 1, device=device)
    assert not pending(window.tree)
    assert pending(torch.ones(1, 2).to(device))


def test_a_loader_draws_as_ever_while_the_step_is_traced(engine):
    """Tracing replaces functions of the whole process; the reading thread must not see it."""
    seen = {}

    def in_a_thread():
        torch.random.set_rng_state(torch.random.get_rng_state())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            seen["drawn"] = torch.rand(2)
        seen["state"] = torch.get_rng_state().numel()
        torch.set_rng_state(torch.get_rng_state())
        seen["compiling"] = torch.compiler.is_compiling()

    def loss_fn(model, x):
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        seen["traced"] = torch.compiler.is_compiling(), torch.get_rng_state().numel()
        return model(x).mean()

    funcacc.accumulate(
        torch.nn.Linear(2, 1).to(funcacc.device(engine)), [torch.ones(1, 2)], loss_fn
    )
    wanted = torch.rand(2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(seen["drawn"], wanted)
    assert seen["state"] == torch.get_rng_state().numel() > 1
    assert (seen["compiling"], seen["traced"]) == (False, (True, 1))


@pytest.mark.parametrize(
    "count, message",
    [
        (0, "count is 0, but its capacity is 3"),
        (torch.tensor(4), "count is 4, but its capacity is 3"),
        (2.0, "count is 2.0; give an int"),
        (True, "count is True; give an int"),
        (torch.tensor(2.5), r"count is float32\[\]; give an int"),
        (torch.tensor([2]), r"count is int64\[1\]; give an int"),
    ],
)
def test_a_count_that_is_none_is_refused(count, message):
    with pytest.raises(funcacc.FuncaccError, match=message):
        as_window(funcacc.Window(torch.zeros(3, 1), count))


def weighted(model, x):
    return (model.weight * x).sum()


def test_a_window_may_hold_numpy_arrays(engine):
    model = torch.nn.Linear(1, 1, bias=False).to(funcacc.device(engine))
    window = funcacc.Window({"x": np.array([[1.0], [3.0], [9.0]], "float32")}, np.int64(2))
    out = funcacc.accumulate(model, window, lambda m, b: weighted(m, b["x"]))
    assert out.grads["weight"].item() == 2.0
    with pytest.raises(funcacc.FuncaccError, match=r"window\['x'\] is 0-d"):
        as_window(funcacc.Window({"x": 1.0}, 1))


def test_a_count_on_the_device_is_cut_at_the_capacity(engine):
    """It can't be checked without waiting; another row, or the last one again, would be wrong."""
    device = funcacc.device(engine)
    model = torch.nn.Linear(1, 1, bias=False).to(device)
    window = funcacc.Window(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor(2).to(device))
    assert funcacc.accumulate(model, window, weighted).grads["weight"].item() == 1.5
    if engine == "xla":
        window.count = torch.tensor(9).to(device)
        out = funcacc.accumulate(model, window, weighted)
        assert (out.grads["weight"].item(), out.weight.item()) == (2.0, 3.0)


@pytest.mark.xla
def test_microbatches_of_a_window_on_two_devices_are_refused():
    there = X.to(funcacc.device("xla"))
    with pytest.raises(
        funcacc.FuncaccError, match=r"microbatch\[1\] is on xla:0, but in microbatch\[0\] .* on cpu"
    ):
        funcacc.stack([X, there])
