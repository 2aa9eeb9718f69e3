"""Trees: the only file that names optree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree

from funcacc.types import PyTree

NAMESPACE = "funcacc"
TreeSpec = optree.PyTreeSpec


def _adopt_mapping(leaf: Any) -> bool:
    """Make the class of a dict-like leaf a node; say whether there was anything to do."""
    if not isinstance(leaf, Mapping):
        return False
    cls = type(leaf)
    optree.register_pytree_node(
        cls,
        lambda m: (tuple(m.values()), tuple(m.keys()), tuple(m.keys())),
        lambda keys, values: cls(dict(zip(keys, values, strict=True))),
        path_entry_type=optree.MappingEntry,
        namespace=NAMESPACE,
    )
    return True


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[tuple[Any, ...], Any, tuple[str, ...]]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Make `cls` a node of trees whose children are attributes."""
    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE
    )


def flatten(tree: PyTree) -> tuple[list[Any], TreeSpec]:
    """The leaves of `tree` in a fixed order, and its structure. `None` is structure."""
    return flatten_until(tree, None)


def flatten_until(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None
) -> tuple[list[Any], TreeSpec]:
    """As `flatten`, with the nodes for which `is_leaf` holds taken as leaves."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    # Dict-like classes of other packages (a tokenizer's BatchEncoding, a model's
    # output) are containers for their users, so they become nodes when first seen.
    if any([_adopt_mapping(leaf) for leaf in leaves]):
        return flatten_until(tree, is_leaf)
    return leaves, spec


def unflatten(spec: TreeSpec, leaves: list[Any]) -> PyTree:
    """The tree of structure `spec` with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def map_tree(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`fn` of each leaf of `tree` and of the leaves of `rest` at the same places."""
    leaves, spec = flatten(tree)
    others = [flatten(other)[0] for other in rest]
    return unflatten(spec, [fn(*xs) for xs in zip(leaves, *others, strict=True)])


def paths(tree: PyTree, root: str) -> list[str]:
    """The path of each leaf as code, e.g. ``params['bn.weight']``."""
    flatten(tree)
    accessors, _, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


def spec_paths(spec: TreeSpec, root: str) -> list[str]:
    """The path of each leaf of a structure, as code."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def first_entries(spec: TreeSpec) -> list[Any]:
    """The key or index in the outermost container of each leaf of a structure."""
    return [path[0] for path in spec.paths()]


def describe_difference(expected: PyTree, actual: PyTree, root: str) -> str:
    """What differs between the structures of two trees, in one line a place."""
    want, got = set(paths(expected, root)), set(paths(actual, root))
    lines = [f"  {p} is missing" for p in sorted(want - got)]
    lines += [f"  {p} is new" for p in sorted(got - want)]
    if not lines:
        lines = [f"  the containers differ: {flatten(expected)[1]} against {flatten(actual)[1]}"]
    return "\n".join(lines)
