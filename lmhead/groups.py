"""Process groups: which one is meant, whether it lives, and the name by which a graph knows it.

torch gives the name of a destroyed group to a later one, whose ranks may be others or in another
order.  So nothing here goes by torch's name alone:

* Eager code holds the group itself, and asks `require` on every call whether torch still has it.
* A graph of compiled code can hold a string only, `graph_name`: torch's name, and the how-manieth
  group of that name lmhead meets in this process.  `resolve` finds that very group, or none.
* A captured graph holds neither, so whoever captures asks `watch` which groups were used.

A process that is started again counts the same groups alike, so graphs that a compiler keeps on
disk are found again, and name what the process has traced them for.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Between torch's name and the number in a graph's name.
_SEPARATOR = "#lmhead-"

_lock = threading.Lock()
_graph_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_by_graph_name: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
_met: Counter[str] = Counter()  # by torch's name, how many groups have had it
# What `watch` collects, with the thread that it watches.
_watching: list[tuple[int, dict[int, dist.ProcessGroup]]] = []


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ProcessGroup that is meant, None for no group at all.

    Raises TypeError or ValueError for what is no group of this process, RuntimeError for a mesh
    whose group has been destroyed.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh, got {group.ndim}-D {tuple(group.shape)}: take "
                "one dimension, or flatten"
            )
        return group.get_group() if torch.compiler.is_compiling() else _of_mesh(group)
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(
            "this process is not a member of the group: only members may build a head or exchange"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}"
        )
    return group


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group that the mesh was made with.  `get_group` looks it up by its name, and would find a
    later one of that name; tracers take it from the registry, as is done here.
    """
    made = {}
    with contextlib.suppress(AttributeError):  # a release without a registry
        made = mesh._get_root_mesh()._pg_registry
    for name in getattr(mesh, "_dim_group_names", ()):
        if name in made:
            return made[name]
    return mesh.get_group()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch still has the group: one look into the table that destroy_process_group empties
    (0.2 us).
    """
    return group in dist.distributed_c10d._world.pg_map


def require(group: dist.ProcessGroup) -> None:
    """RuntimeError where the group has been destroyed."""
    if not is_registered(group):
        raise gone(group.group_name)
    if _watching:
        for thread, used in _watching:
            if thread == threading.get_ident():
                used[id(group)] = group


def gone(name: str) -> RuntimeError:
    """The error of all that was bound to a group which has been destroyed since."""
    return RuntimeError(
        f"process group {name!r} has been destroyed. What was bound to it never goes on with "
        "another group, not even one of the same name: build a new LMHead on a living group, pass "
        "that group to exchange, sample_exchange and share, and compile and capture again"
    )


@contextlib.contextmanager
def watch() -> Iterator[dict[int, dist.ProcessGroup]]:
    """Collects the groups that this thread uses, by id."""
    entry: tuple[int, dict[int, dist.ProcessGroup]] = (threading.get_ident(), {})
    _watching.append(entry)
    try:
        yield entry[1]
    finally:
        _watching[:] = [other for other in _watching if other is not entry]


def graph_name(group: dist.ProcessGroup | None) -> str:
    """What an operator in a graph gets as `group_name` to find this group and no other; "" for
    none.
    """
    if group is None:
        return ""
    # Dynamo of torch 2.13 hands in a stand-in.
    group = getattr(group, "real_obj", group)
    with _lock:
        found = _graph_names.get(group)
        if found is None:
            name = group.group_name
            _met[name] += 1
            found = f"{name}{_SEPARATOR}{_met[name]}"
            _graph_names[group] = found
            _by_graph_name[found] = group
    return found


# What torch.compiler.assume_constant_result sets: a tracer takes the answer as it is, and guards
# the group.  The decorator itself would load the compiler (a second) with the package.
graph_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def identify(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[str, int, int]:
    """(`graph_name`, N, own rank) of a group, "" for none: what code that is being traced may ask
    of it.
    """
    found = process_group(group)
    if found is None:
        return "", 1, 0
    return graph_name(found), dist.get_world_size(found), dist.get_rank(found)


def resolve(name: str) -> dist.ProcessGroup | None:
    """The group of a `graph_name`, or the one that is registered under a plain `name` now; None for
    "".  Looked up on every call.

    Raises RuntimeError where that group has been destroyed.
    """
    if not name:
        return None
    found = _by_graph_name.get(name)
    if found is None:
        plain, marked, _ = name.partition(_SEPARATOR)
        try:
            # torch's functional collectives resolve their groups by the same call.
            found = dist.distributed_c10d._resolve_process_group(plain)  # type: ignore[attr-defined, arg-type]
        except RuntimeError as error:
            raise gone(plain) from error
        # A graph of another process may name a group that this one has not met.
        if marked and graph_name(found) != name:
            raise gone(plain)
    require(found)
    return found
