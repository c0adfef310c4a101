"""How long a process group lives: none that a mesh of ours uses outlives ``destroy_process_group``.

What torch does there is to drop its references. A gloo group that something still holds keeps its threads, and one of
them may be letting go of a tensor, for which it needs the interpreter, just when that shuts down: the process is then
aborted ("terminate called without an active exception"). So we hold groups weakly, and end here what torch leaves:

* a ``DeviceMesh`` holds its groups for ``torch.compile``, and a DTensor, which may be a global, holds its mesh;
* ``torch.distributed.nn.functional``, which every optimizer imports, takes the default group of the moment as the
  default of its functions' arguments, where None would mean the default group of the call.
"""

from __future__ import annotations

import sys
import weakref
from types import FunctionType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel import torch_compat

_ending: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()  # by id: not only the first equal


def end_with_world(mesh: DeviceMesh) -> None:
    """Let a mesh, and the one that it was sliced from, hold process groups only until the default one is destroyed."""
    for each in (mesh, torch_compat.root_of_mesh(mesh)):
        if id(each) not in _ending:
            _ending[id(each)] = each
            # torch tells nobody that it destroys the groups, but it then drops this store, which nothing else holds.
            weakref.finalize(torch_compat.default_store(), _let_go, id(each))


def _let_go(mesh_id: int) -> None:
    mesh = _ending.pop(mesh_id, None)
    if mesh is not None:
        torch_compat.forget_groups(mesh)
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            defaults = (None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(defaults)


def gone() -> RuntimeError:
    """The error for what belongs to process groups that were destroyed."""
    return RuntimeError(
        "the process groups of this mesh are gone: destroy_process_group() was called since it was made. Make the "
        "mesh, and the DTensors on it, anew after init_process_group()"
    )
