"""Views alias exactly: a write is seen by every tensor on the same memory, also across a sync."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, agree, assert_same, message, plain, raised_by


def _grid() -> Tensor:
    return torch.arange(24.0).view(4, 6)


def _cube() -> Tensor:
    return torch.arange(24.0).view(2, 3, 4)


def _thin() -> Tensor:
    return torch.arange(4.0).view(1, 4, 1)


def _complex() -> Tensor:
    return torch.complex(torch.arange(8.0), -torch.arange(8.0)).view(2, 4)


def _pairs() -> Tensor:
    return torch.arange(12.0).view(3, 2, 2)


def _flat() -> Tensor:
    return torch.arange(24.0)


def _image() -> Tensor:
    return torch.arange(96.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)


VIEWS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "view": (_grid, lambda b: b.view(3, 8)),
    "view_minus_one": (_grid, lambda b: b.view(-1)),
    "view_as": (_grid, lambda b: b.view_as(_cube())),
    "reshape": (_grid, lambda b: b.reshape(8, 3)),
    "reshape_of_a_transpose_that_can_be_viewed": (
        _cube,
        lambda b: b.transpose(0, 1)[:1].reshape(2, 4),
    ),
    "flatten": (_cube, lambda b: b.flatten(1)),
    "unflatten": (_grid, lambda b: b.unflatten(1, (2, 3))),
    "ravel": (_grid, lambda b: b.ravel()),
    "t": (_grid, lambda b: b.t()),
    "T": (_grid, lambda b: b.T),
    "mT": (_cube, lambda b: b.mT),
    "H": (_complex, lambda b: b.H),
    "mH": (_complex, lambda b: b.mH),
    "adjoint": (_complex, lambda b: b.adjoint()),
    "transpose": (_cube, lambda b: b.transpose(0, 2)),
    "transpose_negative": (_cube, lambda b: b.transpose(-1, -2)),
    "swapaxes": (_cube, lambda b: b.swapaxes(0, 1)),
    "swapdims": (_cube, lambda b: b.swapdims(1, 2)),
    "permute": (_cube, lambda b: b.permute(2, 0, 1)),
    "movedim": (_cube, lambda b: b.movedim(0, 2)),
    "movedim_many": (_cube, lambda b: b.movedim((0, 1), (2, 0))),
    "moveaxis": (_cube, lambda b: b.moveaxis(2, 0)),
    "select": (_grid, lambda b: b.select(1, 2)),
    "select_negative": (_grid, lambda b: b.select(-1, -2)),
    "index_int": (_grid, lambda b: b[2]),
    "index_two_ints": (_grid, lambda b: b[2, 3]),
    "slice": (_grid, lambda b: b[1:3]),
    "slice_step": (_grid, lambda b: b[:, 1::2]),
    "slice_both": (_grid, lambda b: b[::2, 1:5:3]),
    "slice_negative": (_grid, lambda b: b[-3:, :-2]),
    "slice_all": (_grid, lambda b: b[:]),
    "ellipsis": (_cube, lambda b: b[..., 1]),
    "none": (_grid, lambda b: b[:, None, 1:]),
    "narrow": (_grid, lambda b: b.narrow(1, 2, 3)),
    "split": (_grid, lambda b: b.split(4, dim=1)[1]),
    "split_sizes": (_grid, lambda b: b.split([1, 3, 2], dim=1)[1]),
    "tensor_split": (_grid, lambda b: b.tensor_split(3)[1]),
    "hsplit": (_grid, lambda b: b.hsplit(2)[1]),
    "vsplit": (_grid, lambda b: b.vsplit(2)[0]),
    "dsplit": (_cube, lambda b: b.dsplit(2)[1]),
    "chunk": (_grid, lambda b: b.chunk(3, dim=1)[2]),
    "chunk_of_rows": (_grid, lambda b: b.chunk(4)[3]),
    "unbind": (_grid, lambda b: b.unbind(1)[4]),
    "iteration": (_grid, lambda b: list(b)[2]),
    "unfold": (_grid, lambda b: b.unfold(1, 2, 2)),
    "unfold_with_a_gap": (_grid, lambda b: b.unfold(0, 1, 3)),
    "diagonal": (_grid, lambda b: b.diagonal()),
    "diagonal_offset": (_grid, lambda b: b.diagonal(1)),
    "diagonal_of_dims": (_cube, lambda b: b.diagonal(-1, 0, 2)),
    "diag_of_a_matrix": (_grid, lambda b: torch.diagonal(b, offset=2)),
    "squeeze": (_thin, lambda b: b.squeeze()),
    "squeeze_dim": (_thin, lambda b: b.squeeze(0)),
    "squeeze_dims": (_thin, lambda b: b.squeeze((0, 2))),
    "squeeze_nothing": (_thin, lambda b: b.squeeze(1)),
    "unsqueeze": (_grid, lambda b: b.unsqueeze(1)),
    "unsqueeze_last": (_grid, lambda b: b.unsqueeze(-1)),
    "expand_nothing": (_grid, lambda b: b.expand(4, 6)),
    "expand_new_dim_of_one": (_grid, lambda b: b.expand(1, 4, 6)),
    "as_strided": (_grid, lambda b: b.as_strided((2, 3), (7, 2))),
    "as_strided_offset": (_grid, lambda b: b.as_strided((3,), (5,), 2)),
    "as_strided_of_a_view": (_grid, lambda b: b[1:].as_strided((2, 2), (6, 1), 3)),
    "view_as_real": (_complex, lambda b: torch.view_as_real(b)),
    "view_as_complex": (_pairs, lambda b: torch.view_as_complex(b)),
    "real": (_complex, lambda b: b.real),
    "imag": (_complex, lambda b: b.imag),
    "conj": (_complex, lambda b: b.conj()),
    "imag_of_conj": (_complex, lambda b: b.conj().imag),
    "real_of_float": (_grid, lambda b: b.real),
    "view_dtype_same_size": (_grid, lambda b: b.view(torch.int32)),
    "view_dtype_smaller": (_grid, lambda b: b.view(torch.int16)),
    "view_dtype_larger": (_grid, lambda b: b.view(torch.int64)),
    "detach": (_grid, lambda b: b.detach()),
    "data": (_grid, lambda b: b.data),
    "alias": (_grid, lambda b: torch.ops.aten.alias(b)),
    "contiguous_already": (_grid, lambda b: b.contiguous()),
    "to_nothing": (_grid, lambda b: b.to(torch.float32)),
    "expand_as": (_grid, lambda b: b.expand_as(_grid())),
    "atleast_3d": (_grid, lambda b: torch.atleast_3d(b)),
    "broadcast_to_same": (_grid, lambda b: torch.broadcast_to(b, (4, 6))),
    "channels_last_permute": (_image, lambda b: b.permute(0, 2, 3, 1)),
    "channels_last_flat": (_image, lambda b: b.permute(0, 2, 3, 1).view(-1)),
    "channels_last_select": (_image, lambda b: b[:, 1]),
    "windowed_flat": (_flat, lambda b: b.view(4, 6)[1:, ::2].t()),
}
OVERLAPPING = {
    "expand": (_thin, lambda b: b.expand(3, 4, 2)),
    "expand_row": (_grid, lambda b: b[1].expand(3, 6)),
    "unfold_overlapping": (_grid, lambda b: b.unfold(1, 3, 1)),
    "as_strided_overlapping": (_grid, lambda b: b.as_strided((3, 3), (1, 1))),
    "broadcast_to": (_thin, lambda b: torch.broadcast_to(b, (2, 4, 5))),
}
EVERY_VIEW = {**VIEWS, **OVERLAPPING}

NO_GRADIENT = {"detach", "data", "view_dtype_same_size", "view_dtype_smaller", "view_dtype_larger"}
ONE_OF_MANY = {"split", "split_sizes", "chunk", "chunk_of_rows", "unbind", "iteration"}
"""Views out of ops that return many: autograd refuses in-place writes to them, in eager too."""

SYNCS = {
    "never": (),
    "before_the_write": ("viewed",),
    "everywhere": ("start", "viewed", "written"),
}

every_view = pytest.mark.parametrize("name", EVERY_VIEW)
writable_view = pytest.mark.parametrize("name", VIEWS)
every_sync = pytest.mark.parametrize("when", SYNCS)


def _syncer(when: str) -> Callable[[str], None]:
    return lambda moment: torpor.sync() if moment in SYNCS[when] else None


@every_view
def test_a_view_has_eagers_values_strides_and_offset(put: Put, name: str) -> None:
    make, view = EVERY_VIEW[name]
    got = agree(put, view, make())
    assert got.storage_offset() == view(make()).storage_offset()


@every_sync
@every_view
def test_a_write_to_the_base_is_seen_by_the_view(put: Put, name: str, when: str) -> None:
    make, view = EVERY_VIEW[name]
    sync = _syncer(when)

    def program(base: Tensor) -> object:
        sync("start")
        window = view(base)
        sync("viewed")
        base.mul_(2)
        sync("written")
        return base, window

    agree(put, program, make())


@every_sync
@writable_view
def test_a_write_through_the_view_is_seen_by_the_base(put: Put, name: str, when: str) -> None:
    make, view = VIEWS[name]
    sync = _syncer(when)

    def program(base: Tensor) -> object:
        sync("start")
        window = view(base)
        sync("viewed")
        window.add_(1)
        sync("written")
        return base, window

    agree(put, program, make())


@every_sync
@writable_view
def test_a_write_through_a_view_of_a_view_is_seen_by_all(put: Put, name: str, when: str) -> None:
    make, view = VIEWS[name]
    sync = _syncer(when)

    def program(base: Tensor) -> object:
        sync("start")
        window = view(base)
        small = window.unsqueeze(0).transpose(0, -1)[-1]
        sync("viewed")
        small.mul_(3)
        sync("written")
        window.sub_(1)
        return base, window, small

    agree(put, program, make())


@every_sync
@writable_view
def test_writes_through_overlapping_views_meet(put: Put, name: str, when: str) -> None:
    make, view = VIEWS[name]
    sync = _syncer(when)

    def program(base: Tensor) -> object:
        sync("start")
        window, rest = view(base), base[1:]
        again = view(base)
        sync("viewed")
        window.add_(1)
        rest.mul_(2)
        sync("written")
        window.add_(1)
        base[0] = 7
        return base, window, rest, again

    agree(put, program, make())


@writable_view
def test_a_write_to_a_pending_base_is_seen(put: Put, name: str) -> None:
    make, view = VIEWS[name]

    def program(base: Tensor) -> object:
        base = base + 1
        window = view(base)
        base.mul_(2)
        window.add_(3)
        return base, window

    agree(put, program, make())


@writable_view
def test_a_copy_into_a_view_lands_in_the_base(put: Put, name: str) -> None:
    make, view = VIEWS[name]

    def program(base: Tensor) -> object:
        window = view(base)
        window.copy_(torch.ones_like(window) * 5)
        window[...] = window * 2
        return base, window

    agree(put, program, make())


@writable_view
def test_out_may_be_a_view(put: Put, name: str) -> None:
    make, view = VIEWS[name]

    def program(base: Tensor) -> object:
        window = view(base)
        result = torch.mul(window.clone(), 2, out=window)
        assert result is window
        return base, window

    agree(put, program, make())


@writable_view
def test_a_view_keeps_its_memory_alive_and_shared_when_the_base_is_gone(
    put: Put, name: str
) -> None:
    make, view = VIEWS[name]

    def program(base: Tensor) -> object:
        one, other = view(base), view(base)
        del base
        one.add_(1)
        torpor.sync()
        other.mul_(2)
        return one, other

    agree(put, program, make())


@writable_view
def test_reading_between_writes_gives_the_moments_value(put: Put, name: str) -> None:
    make, view = VIEWS[name]

    def program(base: Tensor) -> object:
        window = view(base)
        values = []
        for number in range(3):
            window.add_(number)
            values.append(base.tolist())
            base.mul_(2)
            values.append(window.tolist())
        return values

    agree(put, program, make())


@writable_view
def test_a_value_taken_before_a_write_does_not_change(put: Put, name: str) -> None:
    make, view = VIEWS[name]

    def program(base: Tensor) -> object:
        window = view(base)
        before = window * 1
        copied = window.clone()
        window.zero_()
        return before, copied, base

    agree(put, program, make())


@pytest.mark.parametrize("name", ["expand", "expand_row", "broadcast_to"])
def test_a_write_through_a_view_that_overlaps_itself_is_refused(put: Put, name: str) -> None:
    make, view = OVERLAPPING[name]
    base = put(make())
    assert type(raised_by(lambda: view(make()).add_(1))) is RuntimeError
    assert type(raised_by(lambda: view(base).add_(1))) is RuntimeError
    assert_same(base, make())


@writable_view
def test_a_view_knows_its_base(put: Put, name: str) -> None:
    make, view = VIEWS[name]
    eager, lazy = make() + 0, put(make()) + 0
    expected, got = view(eager), view(lazy)
    assert got._is_view() == expected._is_view()
    assert (got._base is lazy) == (expected._base is eager)


@pytest.mark.parametrize("name", sorted(set(VIEWS) - NO_GRADIENT - ONE_OF_MANY))
def test_gradients_flow_through_a_write_to_a_view(put: Put, name: str) -> None:
    make, view = VIEWS[name]

    def program(leaf: Tensor) -> object:
        base = leaf * 1
        window = view(base)
        window.mul_(3)
        real = torch.view_as_real(base.resolve_conj()) if base.is_complex() else base
        real.square().sum().backward()
        return leaf.grad

    agree(put, program, make().requires_grad_())


@pytest.mark.parametrize("name", sorted(ONE_OF_MANY))
def test_a_write_that_autograd_refuses_is_refused(put: Put, name: str) -> None:
    make, view = VIEWS[name]
    base = put(make().requires_grad_()) * 1
    assert type(raised_by(lambda: view(base).mul_(3))) is RuntimeError
    assert_same(base.detach(), make())


# --- in-place ops ----------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: t.__iadd__(2),
    "mul_tensor": lambda t: t.mul_(torch.ones_like(t) * 3),
    "copy_": lambda t: t.copy_(torch.zeros_like(t) + 9),
    "copy_broadcast": lambda t: t.copy_(t[0].clone()),
    "copy_other_dtype": lambda t: t.copy_(torch.ones_like(t, dtype=torch.int64)),
    "fill_": lambda t: t.fill_(4),
    "zero_": lambda t: t.zero_(),
    "clamp_": lambda t: t.clamp_(2, 8),
    "setitem_int": lambda t: t.__setitem__(0, 5),
    "setitem_slice": lambda t: t.__setitem__((slice(None), slice(1, 2)), -1.0),
    "setitem_mask": lambda t: t.__setitem__(t > 9, 0.0),
    "setitem_list": lambda t: t.__setitem__([0, 2], 3.0),
    "setitem_tensor": lambda t: t.__setitem__(1, t[0].clone()),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1], device=t.device), 6.0),
    "index_add_": lambda t: t.index_add_(
        0, torch.tensor([1, 1], device=t.device), torch.ones_like(t[:2])
    ),
    "index_copy_": lambda t: t.index_copy_(
        0, torch.tensor([2], device=t.device), torch.zeros_like(t[:1])
    ),
    "index_put_accumulate": lambda t: t.index_put_(
        (torch.tensor([0, 0], device=t.device),), torch.ones_like(t[:2]), accumulate=True
    ),
    "scatter_": lambda t: t.scatter_(0, torch.zeros_like(t, dtype=torch.int64)[:1], 7.0),
    "scatter_add_": lambda t: t.scatter_add_(
        0, torch.zeros_like(t, dtype=torch.int64), torch.ones_like(t)
    ),
    "masked_fill_": lambda t: t.masked_fill_(t > 5, 1.0),
    "masked_scatter_": lambda t: t.masked_scatter_(t > 5, torch.zeros_like(t)),
    "fill_diagonal_": lambda t: t.fill_diagonal_(1.5),
    "tril_": lambda t: t.tril_(),
    "addmm_": lambda t: t.addmm_(torch.ones_like(t[:, :2]), torch.ones_like(t[:2])),
    "lerp_": lambda t: t.lerp_(torch.ones_like(t), 0.5),
    "addcmul_": lambda t: t.addcmul_(torch.ones_like(t), torch.ones_like(t), value=2),
    "exp_": lambda t: t.mul_(0.1).exp_(),
    "relu_": lambda t: torch.relu_(t.sub_(5)),
    "cumsum_": lambda t: t.cumsum_(0),
    "logical_not_": lambda t: t.logical_not_(),
    "put_": lambda t: t.put_(
        torch.tensor([1], device=t.device), torch.full_like(t.flatten()[:1], 8)
    ),
    "renorm_": lambda t: t.renorm_(2, 0, 3.0),
    "foreach": lambda t: torch._foreach_add_([t, t], 1.0),
    "map_of_lists": lambda t: torch._foreach_mul_([t[0], t[1]], [2.0, 3.0]),
    "swap_rows": lambda t: t.__setitem__([0, 1], t[[1, 0]]),
    "shift_overlapping_clone": lambda t: t[1:].copy_(t[:-1].clone()),
    "pow_": lambda t: t.pow_(2),
    "floor_divide_": lambda t: t.floor_divide_(3),
    "remainder_": lambda t: t.remainder_(4),
    "set_by_where": lambda t: t.copy_(torch.where(t > 3, t, -t)),
}
TARGETS = {
    "whole": lambda b: b,
    "window": lambda b: b[1:, 1:4],
    "transposed": lambda b: b.t(),
    "strided": lambda b: b.view(-1)[::2].view(4, 3),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", WRITES)
def test_an_in_place_op_writes_the_memory_it_is_given(put: Put, name: str, target: str) -> None:
    def program(base: Tensor) -> object:
        other = base.view(-1)
        window = TARGETS[target](base)
        WRITES[name](window)
        torpor.sync()
        WRITES[name](window)
        return base, window, other

    agree(put, program, _grid())


@pytest.mark.parametrize("name", ["add_", "mul_tensor", "clamp_", "iadd"])
def test_an_in_place_op_returns_the_tensor_itself(put: Put, name: str) -> None:
    x = put(_grid())
    assert WRITES[name](x) is x


def test_augmented_assignment_to_an_item_writes_once(put: Put) -> None:
    def program(x: Tensor) -> object:
        x[0] += 1
        x[:, 1] *= 2
        x[1, 2] -= 5
        x[x > 10] /= 2
        return x

    agree(put, program, _grid())


def test_version_counters_move_as_eagers(put: Put) -> None:
    def program(x: Tensor) -> object:
        window = x[0]
        versions = [x._version, window._version]
        window.add_(1)
        versions += [x._version, window._version]
        x.data.add_(1)
        x.detach().mul_(2)
        versions += [x._version, window._version]
        return versions

    agree(put, program, _grid())


def test_data_shares_values_but_not_the_gradient(put: Put) -> None:
    def program(x: Tensor) -> object:
        y = (x * x).sum()
        x.data.mul_(2)
        y.backward()
        return x.detach(), x.grad

    agree(put, program, _grid().requires_grad_())


def test_assigning_data_replaces_the_memory(put: Put) -> None:
    def program(x: Tensor, y: Tensor) -> object:
        old = x.detach()
        x.data = y
        x.data.add_(1)
        return x, y, old

    agree(put, program, _grid(), torch.ones(4, 6))


# --- out= ------------------------------------------------------------------------------------


def test_out_of_the_wrong_size_is_resized_with_eagers_warning(put: Put) -> None:
    def program(x: Tensor) -> object:
        out = x.new_empty(2)
        with pytest.warns(UserWarning, match="resized"):
            torch.add(x, 1, out=out)
        return out

    agree(put, program, _grid())


def test_an_empty_out_is_resized(put: Put) -> None:
    def program(x: Tensor) -> object:
        out = x.new_empty(0)
        result = torch.matmul(x, x.t(), out=out)
        assert result is out
        return out

    agree(put, program, _grid())


def test_several_outs_are_written(put: Put) -> None:
    def program(x: Tensor) -> object:
        values, indices = x.new_empty(4), torch.empty(4, dtype=torch.int64, device=x.device)
        result = torch.max(x, 1, out=(values, indices))
        assert result[0] is values
        return values, indices

    if put.name == "concrete":
        with torpor.mode():
            agree(put, program, _grid())
    else:
        agree(put, program, _grid())


def test_out_may_be_an_input(put: Put) -> None:
    agree(put, lambda x: torch.add(x, x, out=x), _grid())


def test_out_of_another_dtype_is_cast(put: Put) -> None:
    agree(put, lambda x: torch.add(x, 0.5, out=torch.empty_like(x, dtype=torch.float64)), _grid())


def test_cat_into_a_view_works(put: Put) -> None:
    def program(x: Tensor) -> object:
        target = x.new_zeros(4, 12)
        torch.cat([x, x], 1, out=target[:, :])
        return target

    agree(put, program, _grid())


# --- memory formats --------------------------------------------------------------------------


def test_channels_last_strides_survive_a_sync(put: Put) -> None:
    def program(x: Tensor) -> object:
        y = x.contiguous(memory_format=torch.channels_last) + 1
        torpor.sync()
        return y, y * 2, y.contiguous(), y.is_contiguous(memory_format=torch.channels_last)

    agree(put, program, torch.randn(2, 3, 4, 5))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.nn.functional.conv2d(x, torch.ones_like(x[:, :, :3, :3])),
        lambda x: torch.nn.functional.max_pool2d(x, 2),
        lambda x: torch.nn.functional.interpolate(x, scale_factor=2.0),
        lambda x: x.relu(),
        lambda x: torch.empty_like(x).fill_(1),
        lambda x: torch.cat([x, x], 1),
        lambda x: x.to(torch.float64),
        lambda x: x.clone(),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        lambda x: x + x.contiguous(),
        lambda x: x.mean((2, 3), keepdim=True),
        lambda x: x.sum(1),
        lambda x: torch.where(x > 0, x, 0.0),
    ],
    ids="conv pool interpolate relu empty_like cat to clone clone_contiguous batch_norm mixed mean "
    "sum where".split(),
)
def test_an_op_on_channels_last_gives_eagers_strides(put: Put, step: Callable) -> None:
    agree(put, lambda x: step(x.to(memory_format=torch.channels_last)), torch.randn(2, 3, 6, 6))


def test_channels_last_3d_strides_are_kept(put: Put) -> None:
    agree(
        put,
        lambda x: x.to(memory_format=torch.channels_last_3d).relu() + 1,
        torch.randn(2, 3, 2, 4, 4),
    )


def test_a_channels_last_leaf_is_a_channels_last_leaf(put: Put) -> None:
    original = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    lazy = put(original)
    assert lazy.stride() == original.stride()
    assert_same(lazy * 2, original * 2)


def test_a_transposed_leaf_keeps_its_strides(put: Put) -> None:
    agree(put, lambda x: (x, x + 1, x.contiguous(), x.clone()), _grid().t())


def test_a_module_moves_to_channels_last(put: Put) -> None:
    def program(model: torch.nn.Module, x: Tensor) -> object:
        model = model.to(memory_format=torch.channels_last)
        y = model(x.to(memory_format=torch.channels_last))
        y.sum().backward()
        return y.detach(), model.weight.detach(), model.weight.grad

    agree(put, program, torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6))


# --- in-place metadata -----------------------------------------------------------------------

METADATA_OPS: dict[str, Callable[[Tensor], object]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "squeeze_all": lambda x: x.unsqueeze_(0).squeeze_(),
    "as_strided_": lambda x: x.as_strided_((2, 3), (1, 2)),
}
MEMORY_OPS: dict[str, Callable[[Tensor], object]] = {
    "resize_smaller": lambda x: x.resize_(2, 3),
    "resize_same": lambda x: x.resize_(6, 4),
    "resize_as_": lambda x: x.resize_as_(torch.empty(3, 2)),
    "set_to_another": lambda x: x.set_(x[1:].clone()),
    "set_to_nothing": lambda x: x.set_(),
    "set_to_own_memory": lambda x: x.set_(x, 2, (3, 2), (2, 1)),
}


@every_sync
@pytest.mark.parametrize("name", METADATA_OPS)
def test_an_in_place_metadata_op_changes_shape_not_memory(put: Put, name: str, when: str) -> None:
    sync = _syncer(when)

    def program(x: Tensor) -> object:
        other = x.detach()
        sync("viewed")
        assert METADATA_OPS[name](x) is x
        sync("written")
        x.add_(1)
        other.mul_(2)
        return x, other, x.shape, x.stride()

    agree(put, program, _grid())


@pytest.mark.parametrize("name", MEMORY_OPS)
def test_a_memory_op_does_as_eager_or_says_it_cannot(put: Put, name: str) -> None:
    def program(x: Tensor) -> object:
        x = x + 0
        MEMORY_OPS[name](x)
        torpor.sync()
        return x, x * 2

    try:
        got = program(put(_grid()))
    except (NotImplementedError, RuntimeError) as refusal:
        assert name.partition("_")[0] in message(refusal)
        assert "test_views.py" in message(refusal)
    else:
        assert_same(got, program(_grid()))


def test_growing_a_tensor_keeps_what_it_held(put: Put) -> None:
    try:
        lazy = (put(_grid()) + 0).resize_(6, 8)
    except (NotImplementedError, RuntimeError) as refusal:
        assert "resize" in message(refusal)
    else:
        assert lazy.shape == (6, 8)
        assert plain(lazy).flatten()[:24].tolist() == _grid().flatten().tolist()


def test_two_tensors_on_one_memory_are_found_to_be_so(put: Put) -> None:
    x = put(_grid())
    assert x.is_set_to(x.view(4, 6))
    assert not x.is_set_to(x.clone())
