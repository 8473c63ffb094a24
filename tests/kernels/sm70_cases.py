"""Steps of `attention_cases` through the Volta kernels, emulated or on a GPU, and the check against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tests.attention_cases import Case

from page4.kernels import sm70
from page4.plan import GroupedPlan, plan_grouped, plan_rows

# Rounding of one fp16 number, relative to it.
EPS = 2.0**-11


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor


def moved(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A view with the same strides over a copy of its whole storage."""
    if view.device == device:
        return view
    storage = view.untyped_storage()
    whole = torch.zeros(0, dtype=view.dtype).set_(storage, 0, (storage.nbytes() // view.element_size(),), (1,))
    return whole.to(device).as_strided(view.shape, view.stride(), view.storage_offset())


def on_device(plan: GroupedPlan, device: torch.device, *, spare: int = 3) -> sm70.Grouped:
    """A reference plan in the planner's device form: `spare` entries and groups that do not exist, regions apart."""
    starts, gap = plan.starts.tolist(), 8 * spare
    begins = [start + gap * (group + 1) for group, start in enumerate(starts[:-1])]
    ends = [begin + after - start for begin, start, after in zip(begins, starts, starts[1:], strict=False)]
    capacity = plan.num_entries + gap * (plan.num_groups + 1)

    def spread(values: torch.Tensor, fill: int, per: int = 1) -> torch.Tensor:
        out = torch.full((capacity // per,), fill, dtype=torch.int32)
        for begin, end, start in zip(begins, ends, starts, strict=False):
            out[begin // per : end // per] = values[start // per : (start + end - begin) // per].int()
        return out.to(device)

    def bounds(values: list[int]) -> torch.Tensor:
        return torch.tensor([*values, *[capacity] * spare], dtype=torch.int32, device=device)

    rows = torch.full((plan.num_groups + spare, plan.group_rows), -1, dtype=torch.int32)
    rows[: plan.num_groups] = plan.rows.int()
    entries = (spread(plan.blocks, 1 << 30), spread(plan.masks, -1), spread(plan.tile_sets, -1, 8))
    steps = max([(end - begin) // 8 for begin, end in zip(begins, ends, strict=True)], default=0)
    sizes = (plan.page_tokens, plan.heads_per_kv, steps)
    return sm70.Grouped(rows.to(device), bounds(begins), bounds(ends), *entries, *sizes)


def run(
    case: Case,
    route: str,
    device: torch.device,
    *,
    group_rows: int = 8,
    split_steps: int | None = None,
    repoint: bool = True,
    zero: bool = True,
    gate: torch.Tensor | None = None,
    want_lse: bool = True,
) -> Result:
    """Out and lse on the CPU; q and gate lie packed, as a projection leaves them."""
    kv = case.layer_kv
    rows, heads, dim = case.q.shape
    packed = torch.stack((case.q, torch.full_like(case.q, math.nan) if gate is None else gate), 2).to(device)
    q, gate_view = packed[:, :, 0], None if gate is None else packed[:, :, 1]
    # What nobody writes must not look like a result.
    out = torch.full((rows, heads, dim), 77.0, dtype=torch.float16, device=device)
    lse = torch.full((rows, heads), 77.0, device=device) if want_lse else None
    scales = {
        name: None if scale is None else scale.tensor(device)
        for name, scale in (("k_scale", kv.k_scale), ("v_scale", kv.v_scale))
    }
    options = {"softmax_scale": dim**-0.5, "gate": gate_view, "out": out, "lse": lse, "zero_unattended": zero, **scales}
    k, v = moved(kv.k, device), moved(kv.v, device)
    assert sm70.layout_refusal(q, k, v, gate_view) is None
    if route == "grouped":
        plan = plan_grouped(
            case.selection,
            case.rows,
            kv.page_tokens,
            heads // k.shape[2],
            group_rows=group_rows,
            repoint_padding=repoint,
        )
        sm70.attend_grouped(q, k, v, on_device(plan, device), split_steps=split_steps, **options)
    else:
        table = plan_rows(case.selection, case.rows, kv.page_tokens, repoint_padding=repoint)
        split = {} if split_steps is None else {"split_steps": split_steps}
        operands = (table.table.int().to(device), table.lengths.int().to(device))
        sm70.attend_rows(q, k, v, *operands, page_tokens=kv.page_tokens, **split, **options)
    return Result(out.cpu(), torch.zeros(0) if lse is None else lse.cpu())


def check(case: Case, found: Result, gate: torch.Tensor | None = None) -> None:
    """Against the truth in float64."""
    want, want_lse = case.expected()
    largest = max([v.abs().max().item() for v in case.v if v.numel()], default=1.0)
    if gate is not None:
        want = want * gate.double().sigmoid()
    # A probability is rounded once, so is a stored part and the output.
    assert ((found.out.double() - want).abs() <= largest * 3 * EPS).all(), (found.out.double() - want).abs().max()
    finite = want_lse > -math.inf
    assert torch.equal(found.lse > -math.inf, finite)
    if finite.any():
        assert (found.lse.double() - want_lse)[finite].abs().max() <= 5e-5 * max(
            1.0, want_lse[finite].abs().max().item()
        )
