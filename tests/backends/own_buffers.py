"""A backend whose buffers are its own: NumPy arrays, in a class that is no torch tensor."""

import numpy
import torch

from torpor.backend import Backend, BackendData
from torpor.backends import kernels

OWN = {"aten.add.Tensor": lambda x, y, alpha: x + alpha * y, "aten.mul.Tensor": lambda x, y: x * y}
BYTES = (torch.bfloat16, torch.complex32)  # NumPy has no such numbers: arrays of their bytes


class Array(BackendData):
    array = None  # strides are made when a tensor is asked for

    def filled(self):
        return self.array is not None

    def assign(self, other):
        self.error, self.array = other.error, other.array


class OwnBuffers(Backend):
    """Adds and multiplies arrays; all else falls back to torch, in the middle of a graph."""

    def placeholder(self, device, type_, array=None):
        data = Array(device, type_)
        data.array = None if array is None else array.copy()  # shares memory with nothing
        return data

    def data_from_tensor(self, tensor, type_, device):
        return self.placeholder(device, type_, array_of(tensor))

    def tensor_from_data(self, data, logical_dtype=None):
        return tensor_of(data.wait().array, data.type).to(logical_dtype or data.type.dtype)

    def compile(self, computations):
        return list(computations)

    def execute(self, computation, arguments, device):
        arrays = [a.wait().array if isinstance(a, Array) else a for a in arguments]
        env = dict(zip(computation.graph.inputs, arrays))
        for node in computation.graph.nodes:
            dtypes = {getattr(v.type, "dtype", torch.float32) for v in node.operands}
            if node.op.name in OWN and dtypes == {torch.float32}:
                outputs = [numpy.asarray(OWN[node.op.name](*[env.get(a, a) for a in node.args]))]
            else:
                outputs = kernels.run_converted(node, env, device, tensor_of, array_of)
            env.update(zip(node.outputs, outputs))
        return [self.placeholder(device, v.type, env[v]) for v in computation.graph.outputs]


def array_of(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return (tensor.view(-1).view(torch.uint8) if tensor.dtype in BYTES else tensor).numpy()


def tensor_of(array, type_):
    return kernels.as_promised(torch.from_numpy(array).view(type_.dtype).view(type_.shape), type_)
