"""What the lines of drawn programs can be: views, writes, results, reads, cuts.

A line is Python text. `{a}`, `{b}` and `{c}` are tensors of the program, `n` and `m` are the sizes
of the step. `writes` are the letters that it writes to: a write to memory that it also reads in
part, or that holds an element twice, has no defined result in eager, and is left out
(`drawn_run.probe`).
"""

from __future__ import annotations

from dataclasses import dataclass

LEAF_DTYPES = (
    "float32", "float32", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16",
    "uint8", "bool", "complex64",
)  # fmt: skip
FIXED_SHAPES = (
    "()",
    "(6,)",
    "(8,)",
    "(4,6)",
    "(1,4)",
    "(4,1)",
    "(3,4)",
    "(2,2,3)",
    "(0,4)",
    "(5,3)",
)
SIZED_SHAPES = ("(n,)", "(n,m)", "(m,n)", "(n,4)", "(m,n,2)", "(n+m,)", "(n,n)", "(2*n,)", "(1,n)")


@dataclass(frozen=True)
class Line:
    """One kind of line; `makes` is whether it gives a tensor that joins the program's."""

    text: str
    makes: bool = True
    writes: str = ""
    exact: bool = True  # small errors in its operands stay small: no comparisons, no sorting


def _views(text: str) -> tuple[Line, ...]:
    return tuple(Line(each.strip()) for each in text.strip().splitlines())


def _writes(text: str, letters: str = "a") -> tuple[Line, ...]:
    return tuple(Line(each.strip(), False, letters) for each in text.strip().splitlines())


VIEWS = _views("""
    {a}[::2]
    {a}[..., 1:]
    {a}[1:]
    {a}[..., :0]
    {a}[None]
    {a}[..., 1]
    {a}[..., -1:].expand(*{a}.shape)
    {a}.select(-1, -1)
    {a}.select(0, 0)
    {a}.narrow(-1, 0, 1)
    {a}.t()
    {a}.mT
    {a}.transpose(0, -1)
    {a}.permute(*range({a}.dim() - 1, -1, -1))
    {a}.movedim(0, -1)
    {a}.view(-1)
    {a}.view(2, -1)
    {a}.reshape(-1)
    {a}.reshape(-1, 2)
    {a}.flatten()
    {a}.unflatten(-1, (2, -1))
    {a}.squeeze()
    {a}.unsqueeze(-1)
    {a}.unsqueeze(0)
    {a}.diagonal()
    {a}.unfold(0, 2, 1)
    {a}.expand(2, *{a}.shape)
    torch.broadcast_to({a}, (2, *{a}.shape))[1]
    {a}.split(2)[0]
    {a}.split(1, -1)[-1]
    {a}.chunk(2)[-1]
    {a}.tensor_split(3, -1)[1]
    {a}.unbind(0)[-1]
    {a}.as_strided((3,), (1,))
    {a}.as_strided((2,), (2,), 1)
    {a}.as_strided((2, 2), (1, 2))
    {a}.view({a}.dtype)
    {a}.view(torch.uint8)
    {a}.view(torch.int32)
    {a}.view_as({b})
    {a}.expand_as({b})
    {a}.real
    {a}.imag
    {a}.conj()
    torch.view_as_real({a})
    torch.view_as_complex({a}.reshape(-1, 2))
    torch.atleast_2d({a})
    {a}.detach()
    {a}.data
    {a}.swapaxes(0, -1)
    {a}.view(*{a}.shape)
    {a}.hsplit(2)[0]
    {a}.contiguous()
    {a}.to({a}.dtype)
""")

SIZED_VIEWS = _views("""
    {a}[: n]
    {a}[n - 1 :]
    {a}[..., : m]
    {a}[m // 2 : n]
    {a}.view(n, -1)
    {a}.view(-1, m)
    {a}.reshape(m, -1)
    {a}.narrow(0, 0, min(n, len({a})))
    {a}.expand(n, *{a}.shape)
    {a}.unfold(0, min(m, len({a})), 1)
    {a}.split(m)[0]
    {a}.as_strided((n,), (1,))
    {a}.as_strided((m, 2), (2, 1))
    {a}.select(0, n // 2)
    {a}.unflatten(0, (n, -1))
""")

WRITES = (
    *_writes("""
    {a}.add_(1)
    {a}.mul_(2)
    {a}.sub_({a}.clone())
    {a}.neg_()
    {a}.fill_(3)
    {a}.zero_()
    {a}.abs_()
    {a}.clamp_(-2, 3)
    {a}.pow_(2)
    {a}.nan_to_num_()
    {a}.tril_()
    {a}.relu_()
    {a}.cumsum_(0)
    {a}.masked_fill_({a} > 0, 1)
    {a}.view(-1)[::2].mul_(3)
    {a}.view(-1)[1:].uniform_()
    {a}.movedim(0, -1)[0].sub_(1)
    {a}.diagonal().fill_(5)
    {a}[..., 0].add_(2)
    {a}[0] = 7
    {a}[..., ::2] = -1
    {a}[{a} > 0] = 0
    {a}[{a} > 0] *= 2
    {a}[[0, -1]] = 4
    {a}.index_fill_(0, torch.tensor([0]).to({a}.device), 2)
    {a}.copy_({a}.flip(0))
    [c.add_(i) for i, c in enumerate({a}.chunk(2))]
    [c.mul_(i) for i, c in enumerate({a}.unbind(-1))]
    {a}.t().add_(1)
    {a}.flatten().add_(1)
    {a}.uniform_(-1, 1)
    {a}.normal_(1, 2)
    {a}.bernoulli_(0.3)
    {a}.bernoulli_({a}.clone().abs().clamp(0, 1))
    {a}.random_(0, 9)
    {a}.geometric_(0.3)
    {a}.exponential_()
    {a}.data.mul_(0.5)
    {a}.detach().add_(1)
    torch.nn.functional.relu({a}, inplace=True)
    torch.nn.functional.dropout({a}, 0.5, inplace=True)
    torch._foreach_zero_([{a}])
    torch._foreach_mul_([{a}, {a}.clone()], 2)
    {a}.remainder_(3)
    {a}.sin_()
    {a}.square_()
    {a}.copy_(torch.full({a}.shape, 2.0))
    {a}.scatter_add_(0, torch.zeros_like({a}, dtype=torch.int64), {a}.clone())
    """),
    *_writes("""
    {a}.copy_({b})
    {a}.add_({b})
    {a}.sub_({b}, alpha=2)
    {a}.mul_({b})
    {a}.maximum({b}).add_(1)
    {a}.addcmul_({b}, {b})
    {a}.lerp_({b}, 0.25)
    {a}[0] = {b}
    {a}[..., :1] = {b}
    {a}[1:] = {b}[:-1]
    {a}.masked_scatter_({a} > 0, {b}.flatten()[:1].repeat({a}.numel()))
    {a}.index_put_((torch.tensor([0, 0]).to({a}.device),), {b}[:1], accumulate=True)
    {a}.index_add_(0, torch.zeros(len({b}), dtype=torch.int64).to({a}.device), {b})
    {a}.split(1)[0].copy_({b}.split(1)[-1])
    torch.add({a}.clone(), {b}, out={a})
    torch.sub({b}, 1, out={a}[...])
    torch.mul({b}, 2, out={a})
    torch.sin({b}, out={a}.view(-1)[:1])
    torch.cat([{b}, {b}], out={a})
    torch.where({b} > 0, {b}, {b} * 2, out={a})
    torch.sum({b}, 0, out={a})
    torch.cumsum({b}, 0, out={a})
    torch.gather({b}, 0, torch.zeros_like({b}, dtype=torch.int64), out={a})
    torch._foreach_add_([{a}], [{b}])
    torch._foreach_copy_([{a}], [{b}])
    {a}.logical_and_({b})
    {a}.bitwise_xor_({b})
    {a}.fill_({b}.flatten()[0])
    {a}.copy_({b}.expand_as({a}))
    """),
)

RESHAPES = _writes("""
    {a}.t_()
    {a}.squeeze_()
    {a}.unsqueeze_(0)
    {a}.transpose_(0, -1)
    {a}.swapaxes_(0, -1)
    if holds({a}, 2, {a}): {a}.as_strided_((2,), (1,))
    {a}.resize_(({a}.numel(),))
    {a}.resize_(2, 1).fill_(1)
    {a}.set_({b})
    if holds({b}, 2, {a}): {a}.set_({b}.untyped_storage(), 0, (2,), (1,))
    if holds({b}, 3, {a}): {a}.set_({b}.untyped_storage(), 1, (2,), (1,))
    {a}.data = {b}.detach()
    {a}.data = {b}.clone()
""")

MAPS = _views("""
    {a} + 1
    {a} * 0.5
    1 - {a}
    -{a}
    {a}.abs()
    {a}.sin()
    ({a} * 0.1).exp()
    {a}.relu()
    {a}.softmax(-1)
    {a}.clone()
    {a}.double()
    {a}.float()
    {a}.to(torch.bfloat16)
    {a}.nan_to_num(0, 0, 0).clamp(-50, 50).to(torch.int32)
    {a}.cumsum(-1)
    {a}.flip(0)
    {a}.roll(1, 0)
    {a}[[0, -1]]
    {a}.gather(0, torch.zeros_like({a}, dtype=torch.int64))
    {a}.repeat(2, *[1] * ({a}.dim() - 1))
    {a}.repeat_interleave(2)
    torch.zeros_like({a})
    torch.ones_like({a}) * 2
    {a}.new_zeros(2, 3)
    {a}.triu()
    {a}.tril()
    F.pad({a}, (1, 0))
    F.pad({a}, (1, 2), value=3)
    F.layer_norm({a}, {a}.shape[-1:])
    F.dropout({a}, 0.5)
    F.max_pool1d({a}.reshape(1, 1, -1), 2)
    F.avg_pool1d({a}.reshape(1, 1, -1), 2)
    F.embedding({a}.nan_to_num(0, 0, 0).long().abs() % 4, L(torch.arange(8.0).view(4, 2)))
    F.one_hot({a}.long().abs() % 4, 4)
    F.linear({a}, {a}[:1])
    {a}.sum()
    {a}.sum(0)
    {a}.sum(-1, keepdim=True)
    {a}.mean(-1)
    {a}.prod(0)
    {a}.var(-1, correction=0)
    {a}.norm()
    {a}.logsumexp(-1)
    {a}.diff()
    {a}.floor()
    {a}.square()
    {a}.sigmoid()
    {a}.view(-1).outer({a}.view(-1))
    torch.rand_like({a})
    torch.randn_like({a})
    torch.stack([{a}, {a}])
    torch.tensor([1.0, 2.0]).to({a}.device)
    torch.arange(len({a})).to({a}.device)
    copy.deepcopy({a})
    pickle.loads(pickle.dumps({a}))
    {a}.new_tensor([1, 2])
    torch.empty_like({a}).copy_({a})
    {a}.index_select(0, torch.tensor([0]).to({a}.device))
    {a}.slice_scatter({a}[:1] * 2, 0, 0, 1)
    torch.einsum("...i,...i->...", {a}, {a})
    {a}.addmm({a}, {a})
    gradient(lambda x: x.sin(), {a})
    gradient(lambda x: x.view(-1)[::2] * x.view(-1)[::2], {a})
    gradient(lambda x: x.clone().mul_(2).pow(2), {a})
    gradient(lambda x: x.t().softmax(-1).cumsum(0), {a})
    gradient(lambda x: torch.cat([x, x * 2])[1:], {a})
""")

UNSTABLE = (
    Line("{a} > 1", exact=False),
    Line("{a} == {b}", exact=False),
    Line("torch.where({a} > 1, {a}, -{a})", exact=False),
    Line("torch.where({a} > {b}, {a}, {b})", exact=False),
    Line("{a}.sort(-1).values", exact=False),
    Line("{a}.sort(0).indices", exact=False),
    Line("{a}.argmax(-1)", exact=False),
    Line("{a}.max(0).indices", exact=False),
    Line("{a}.amax(0)", exact=False),
    Line("{a}.topk(1).values", exact=False),
    Line("{a}.nonzero()", exact=False),
    Line("{a}[{a} > 0]", exact=False),
    Line("{a}.masked_select({a} > 0)", exact=False),
    Line("{a}.unique()", exact=False),
    Line("{a} // 3", exact=False),
    Line("{a} % 3", exact=False),
    Line("{a}.round()", exact=False),
    Line("{a}.sign()", exact=False),
    Line("torch.bernoulli({a}.sigmoid())", exact=False),
    Line("{a}.masked_fill({a} > 1, 2)", exact=False),
    Line("{a}.isclose({b})", exact=False),
    Line("{a}.bool()", exact=False),
    Line("{a}.any(-1)", exact=False),
    Line("{a}.count_nonzero()", exact=False),
)

PAIRS = _views("""
    {a} + {b}
    {a} - {b}
    {a} * {b}
    torch.maximum({a}, {b})
    torch.clamp({a}, {b})
    {a} @ {b}
    {a} @ {b}.transpose(-1, -2)
    torch.cat([{a}, {b}])
    torch.cat([{a}.flatten(), {b}.flatten()])
    torch.stack([{a}, {b}])
    torch.addcmul({a}, {a}, {b}, value=0.5)
    torch.lerp({a}, {b}, 0.5)
    {a}.hypot({b})
    {a}.copysign({b})
    {a}.type_as({b})
    {a} & {b}
    torch.outer({a}.flatten()[:3], {b}.flatten()[:4])
    torch.cdist({a}, {b})
    torch.atan2({a}, {b})
    gradient(lambda x: x * {b}, {a})
    gradient(lambda x: x @ {b}.detach(), {a})
    F.mse_loss({a}, {b})
""")

SIZED_MAPS = _views("""
    {a} * n
    {a} + len({a})
    torch.zeros(n, m).to({a}.device) + {a}.flatten()[:1]
    torch.full((n,), 0.5).to({a}.device)
    {a}.new_zeros(n, 3)
    {a}.new_full((m, n), 2)
    F.pad({a}, (0, n))
    {a}.flatten()[: n].outer({a}.flatten()[: m])
    {a}.repeat(m)
    torch.arange(n).to({a}.device) * 2
    torch.ones(n, n).to({a}.device).tril()
    {a}.flatten()[: n * 2].view(n, 2).sum(0)
    {a}[torch.arange(n).to({a}.device) % max(len({a}), 1)]
    {a}.flatten()[: n] + {b}.flatten()[: n]
    {a}.sum() / n
    gradient(lambda x: x.flatten()[: n].cumsum(0), {a})
""")

READS = tuple(
    Line(text, makes=False)
    for text in (
        "out({a}.tolist())",
        "out({a}.sum().item())",
        "out(bool({a}.numel() and {a}.flatten()[0] == {a}.flatten()[0]))",
        "out(({a}.shape, {a}.stride(), {a}.storage_offset(), {a}.is_contiguous()))",
        "out({a}.cpu().contiguous())",
        "out(numbers({a}))",
        "out(len({a}))",
        "out({a}._is_view())",
        "out(float({a}.flatten()[0]) if {a}.numel() else 0)",
    )
)

CUTS = tuple(Line(text, makes=False) for text in ("S()", "S()", "S(wait=True)", "S({a})"))

GUARDED = "if {a}.numel() and bool({a}.float().sum().abs() > 1): "
