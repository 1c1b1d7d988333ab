"""A definition of flashinfer-bench as an operator of the lab, and its workloads.

The reference is the gate, computed from float32 copies of 16-bit inputs where it takes them, and a rival: as given. Of
expertile race what a user calls on the inputs as they are ("expertile"), and for MoE layers the same with weights that
were rearranged before ("expertile-arranged").
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from expertile.lab.flashinfer.definition import Definition, Task
from expertile.lab.flashinfer.kinds import kind_of
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import TORCH_DTYPES, Call, Inputs, Operator, Rival, Workload
from expertile.roofline import Work

REFERENCE, OURS, ARRANGED = "reference", "expertile", "expertile-arranged"


def workload(task: Task) -> Workload:
    """`task` as records name it: "definition/axes-uuid"; its dims are the uuid and every axis. ValueError for a dtype
    that the lab does not measure."""
    d = task.definition
    axes = {axis: n for axis, n in {**d.axes, **task.axes}.items() if n is not None}
    name = "-".join((*(f"{axis}{n}" for axis, n in task.axes.items()), task.uuid[:8]))
    dtype = min((x for x in map(task.dtype, d.tensors) if x.is_floating_point), key=lambda x: x.itemsize)
    known = next((key for key, x in TORCH_DTYPES.items() if x is dtype), str(dtype))
    return Workload(name, d.name, d.op_type, (("uuid", task.uuid), *axes.items()), known)


def operator(definition: Definition, tasks: Sequence[Task]) -> Operator:
    """What races on `tasks`, all of `definition`. ValueError says why expertile serves no such definition."""
    kind, of = kind_of(definition), {task.uuid: task for task in tasks}

    def make(w: Workload, device: torch.device, seed: int) -> Inputs:
        task = of[w["uuid"]]
        made = {**task.make(definition.tensors, device, seed), **kind.fixed_inputs(task)}
        return tuple(made[name].to(device) for name in definition.tensors)

    def given(w: Workload, inputs: Inputs) -> dict[str, Any]:
        """The arguments of a call, in the order of the definition."""
        scalars = of[w["uuid"]].make(definition.inputs.keys() - definition.tensors, torch.device("cpu"), 0)
        found = {**scalars, **dict(zip(definition.tensors, inputs, strict=True))}
        return {name: found[name] for name in definition.inputs}

    def reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
        arguments = given(w, inputs)
        with full_precision(), torch.no_grad():
            try:
                out = definition.reference()(**{name: _wide(x) for name, x in arguments.items()})
            except Exception:  # it insists on its dtypes
                out = definition.reference()(**arguments)
        return tuple(x.float() for x in _outputs(definition, out))

    def as_given(w: Workload, inputs: Inputs) -> Call:
        run, arguments = definition.reference(), given(w, inputs)
        return lambda: _outputs(definition, run(**arguments))

    def ours(w: Workload, inputs: Inputs, arranged: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Call:
        arguments = arranged(given(w, inputs))
        return lambda: (kind.compute(**arguments),)

    @cache
    def work(uuid: str) -> Work:
        return kind.work(of[uuid], kind.fixed_inputs(of[uuid]))

    rivals = [Rival(REFERENCE, as_given, graph=kind.capturable), Rival(OURS, ours, peer=False)]
    if kind.arranged is not None:
        how = {"weights": "gate first, before timing"}
        rivals.append(Rival(ARRANGED, partial(ours, arranged=kind.arranged), peer=False, config=how))
    return Operator(
        definition.op_type,
        make,
        reference,
        lambda w: work(w["uuid"]),
        tuple(rivals),
        lambda w: kind.tolerance(of[w["uuid"]]),
        memory_nbytes=lambda w: 5.0 * of[w["uuid"]].nbytes(),  # e4m3 inputs, and once more in float32
        set_nbytes=lambda w: float(of[w["uuid"]].nbytes()),
    )


def _outputs(definition: Definition, out: Any) -> tuple[Tensor, ...]:
    if isinstance(out, Mapping):
        return tuple(out[name] for name in definition.outputs)
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
