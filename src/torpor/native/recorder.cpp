// The native recorder: calls of ops that were met before, recorded without entering Python.
//
// It is a cache in front of the recorders that are Python functions (trace/recorder.py), which stay
// the one truth. torch hands every op on a lazy tensor to the kernel of its dispatch key `Python`;
// here each op that is recorded gets such a kernel. It reads the tensors' values, builds the very
// key that the op's Python recorder builds, and looks it up in the op's own dictionary of nodes. On
// a hit it makes the results. In every other case it calls the kernel that torch has for all ops,
// which enters Python, before it has changed anything: a miss, a stale view, a plain tensor, an
// unusual argument, somebody else's dispatch mode, a setting that replaced the Python recorder.
//
// Nodes, values, storages, views and the trace are the Python objects they always are. Objects with
// `__slots__` are read and written at the offsets that their member descriptors name.
//
// Everything runs under the GIL; what is recorded runs under the trace's lock too, as in Python.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include "keys.h"

namespace torpor {

// -- tensors --------------------------------------------------------------------------------------

static const Wrapper& wrapper_of(World& w, PyObject* type) {
  PyObject* arguments = w.type_wrapper.of(type);
  auto found = w.wrappers.find(arguments);
  if (found != w.wrappers.end()) return found->second;
  c10::InferenceMode no_inference(false);
  Ref all = checked(PyTuple_New(1 + PyTuple_GET_SIZE(arguments)));
  PyTuple_SET_ITEM(all.get(), 0, Py_NewRef(reinterpret_cast<PyObject*>(w.lazy_tensor)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
    PyTuple_SET_ITEM(all.get(), i + 1, Py_NewRef(PyTuple_GET_ITEM(arguments, i)));
  }
  Ref made = checked(PyObject_CallObject(w.make_wrapper, all.get()));
  const at::Tensor& tensor = THPVariable_Unpack(made.get());
  if (w.wrappers.size() >= kMaxWrappers) {
    for (auto& entry : w.wrappers) Py_DECREF(entry.first);
    w.wrappers.clear();
  }
  const bool contiguous = PyTuple_GET_ITEM(arguments, 1) == Py_None;  // its strides are not told
  Wrapper learnt{
      c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), contiguous,
      tensor.storage_offset(), tensor.storage().nbytes(), tensor.dtype(), tensor.device(),
      tensor.key_set() - c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  return w.wrappers.emplace(Py_NewRef(arguments), std::move(learnt)).first->second;
}

// A tensor with no memory, as `_make_wrapper_subclass` makes it.
static at::Tensor bare_tensor(const Wrapper& like) {
  c10::Storage memory(
      c10::Storage::use_byte_size_t{}, like.nbytes, at::DataPtr(nullptr, like.device),
      c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(memory), like.keys, like.dtype);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (like.contiguous) {
    impl->set_sizes_contiguous(like.sizes);
    if (like.offset) impl->set_storage_offset(like.offset);
  } else {
    impl->set_sizes_and_strides(like.sizes, like.strides, like.offset);
  }
  impl->set_python_dispatch(true);
  return tensor;
}

// Makes it a lazy tensor: gives it its Python object. The tensor holds on to that.
static at::Tensor as_lazy_tensor(
    const World& w, at::Tensor tensor, PyObject* storage, PyObject* view) {
  Ref object = checked(THPVariable_Wrap(tensor, w.lazy_tensor));
  if (PyObject_SetAttr(object.get(), w.name_storage, storage) < 0 ||
      PyObject_SetAttr(object.get(), w.name_view, view) < 0) {
    fail();
  }
  return tensor;
}

// Let the trace know a storage that it may have to compute.
static void enlist(const World& w, PyObject* storage) {
  w.storage_listed.set(storage, Py_True);
  Ref reference = checked(PyWeakref_NewRef(storage, w.forget));
  if (PyDict_SetItem(w.pending, reference.get(), Py_None) < 0) fail();
}

static at::Tensor fresh_tensor(World& w, PyObject* value) {
  PyObject* type = w.value_type.of(value);
  at::Tensor tensor = bare_tensor(wrapper_of(w, type));
  Ref storage = checked(w.lazy_storage->tp_alloc(w.lazy_storage, 0));
  w.storage_type.set(storage.get(), type);
  w.storage_value.set(storage.get(), value);
  w.storage_data.set(storage.get(), Py_None);
  enlist(w, storage.get());
  return as_lazy_tensor(w, std::move(tensor), storage.get(), Py_None);
}

// An inference tensor only if what it views is one, whatever the mode.
static at::Tensor bare_view(World& w, const Operand& operand, PyObject* type) {
  std::optional<c10::InferenceMode> as_viewed;
  if (c10::InferenceMode::is_enabled()) {
    as_viewed.emplace(THPVariable_Unpack(operand.tensor).is_inference());
  }
  return bare_tensor(wrapper_of(w, type));
}

// A view of `operand`, which by `node` shows `value`.
static at::Tensor view_tensor(World& w, const Operand& operand, PyObject* node, PyObject* value) {
  at::Tensor tensor = bare_view(w, operand, w.value_type.of(value));
  Ref view = checked(w.view->tp_alloc(w.view, 0));
  w.view_parent.set(view.get(), operand.view.get());
  w.view_node.set(view.get(), node);
  w.view_index.set(view.get(), w.value_index.of(value));
  w.view_value.set(view.get(), value);
  w.view_base.set(view.get(), w.storage_value.of(operand.storage.get()));
  return as_lazy_tensor(w, std::move(tensor), operand.storage.get(), view.get());
}

static at::Tensor alias_tensor(World& w, const Operand& operand, PyObject* value) {
  at::Tensor tensor = bare_view(w, operand, w.value_type.of(value));
  return as_lazy_tensor(w, std::move(tensor), operand.storage.get(), operand.view.get());
}

static void write(const World& w, const Operand& operand, PyObject* value) {
  PyObject* storage = operand.storage.get();
  w.storage_value.set(storage, value);
  w.storage_data.set(storage, Py_None);
  if (w.storage_listed.of(storage) != Py_True) enlist(w, storage);
}

// -- hits -----------------------------------------------------------------------------------------

// The values that a hit gives; null if it is not what is known here.
static PyObject* outputs_of(const World& w, PyObject* node) {
  PyObject* outputs = nullptr;
  if (Py_TYPE(node) == w.node) outputs = w.node_outputs.of(node);
  else if (Py_TYPE(node) == w.expansion) outputs = w.expansion_outputs.of(node);
  return outputs != nullptr && PyTuple_CheckExact(outputs) ? outputs : nullptr;
}

static bool is_tensor_type(const World& w, PyObject* type) {
  return type != nullptr && (Py_TYPE(type) == w.tensor_type || Py_TYPE(type) == w.symbolic_type);
}

// The trace stays shorter than it may get, also with so many more results.
static bool has_room(const World& w, Py_ssize_t results) {
  PyObject* limit = PyDict_GetItemWithError(w.config, w.name_limit);
  return limit != nullptr && PyLong_Check(limit) &&
      PyDict_GET_SIZE(w.pending) + results <= PyLong_AsSsize_t(limit);
}

static bool can_be_fresh(const World& w, PyObject* outputs, bool optional) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i) {
    PyObject* type = w.value_type.of(PyTuple_GET_ITEM(outputs, i));
    if (!is_tensor_type(w, type) && !(optional && type == Py_None)) return false;
  }
  return has_room(w, PyTuple_GET_SIZE(outputs));
}

// Views that are right in this trace only, and those with conjugate or negative bits, are Python's.
static bool can_be_views(const World& w, PyObject* node, PyObject* outputs) {
  if (Py_TYPE(node) != w.node || w.node_passing.of(node) != Py_False) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i) {
    PyObject* type = w.value_type.of(PyTuple_GET_ITEM(outputs, i));
    if (!is_tensor_type(w, type)) return false;
    if (w.type_conj.of(type) != Py_False || w.type_neg.of(type) != Py_False) return false;
  }
  return true;
}

// What is written is all of a storage that nothing else among the arguments is on.
static bool can_be_written(const Op& op, const std::vector<Operand>& operands, size_t written) {
  for (size_t i = 0; i < written; ++i) {
    if (operands[i].argument != 0 || operands[i].view.get() != Py_None) return false;
  }
  if (op.result == Result::write) {
    for (size_t i = 1; i < operands.size() && op.overlaps; ++i) {
      if (operands[i].storage.get() != operands[0].storage.get()) continue;
      const bool in_list = op.kinds[operands[i].argument] == Kind::tensors;
      if (in_list || operands[i].tensor != operands[0].tensor) return false;
    }
    return true;
  }
  std::vector<PyObject*> storages;
  for (size_t i = 0; i < written; ++i) storages.push_back(operands[i].storage.get());
  std::sort(storages.begin(), storages.end());
  return std::adjacent_find(storages.begin(), storages.end()) == storages.end();
}

static void count(const Op& op) {
  const long long calls = PyLong_AsLongLong(PyList_GET_ITEM(op.cell, 0));
  PyList_SetItem(op.cell, 0, checked(PyLong_FromLongLong(calls + 1)).release());
}

// Makes the results of a hit; nothing has happened if it says that it could not.
static bool finish(
    World& w, const Op& op, const Call& call, PyObject* node, std::vector<IValue>& results) {
  PyObject* outputs = outputs_of(w, node);
  if (outputs == nullptr) return false;
  const Py_ssize_t number = PyTuple_GET_SIZE(outputs);
  const auto& operands = call.operands();
  const bool kept = !operands.empty() && operands[0].argument == 0;
  switch (op.result) {
    case Result::fresh: {
      if (!can_be_fresh(w, outputs, number > 1)) return false;
      for (Py_ssize_t i = 0; i < number; ++i) {
        PyObject* value = PyTuple_GET_ITEM(outputs, i);
        const bool none = w.value_type.of(value) == Py_None;
        results.emplace_back(none ? at::Tensor() : fresh_tensor(w, value));
      }
      break;
    }
    case Result::fresh_list: {
      if (!can_be_fresh(w, outputs, false)) return false;
      c10::List<at::Tensor> list;
      for (Py_ssize_t i = 0; i < number; ++i) {
        list.push_back(fresh_tensor(w, PyTuple_GET_ITEM(outputs, i)));
      }
      results.emplace_back(std::move(list));
      break;
    }
    case Result::view:
    case Result::alias: {
      if (!kept || number != 1 || !can_be_views(w, node, outputs)) return false;
      PyObject* value = PyTuple_GET_ITEM(outputs, 0);
      results.emplace_back(
          op.result == Result::alias ? alias_tensor(w, operands[0], value)
                                     : view_tensor(w, operands[0], node, value));
      break;
    }
    case Result::view_list: {
      if (!kept || !can_be_views(w, node, outputs)) return false;
      c10::List<at::Tensor> list;
      for (Py_ssize_t i = 0; i < number; ++i) {
        list.push_back(view_tensor(w, operands[0], node, PyTuple_GET_ITEM(outputs, i)));
      }
      results.emplace_back(std::move(list));
      break;
    }
    case Result::write: {
      if (!kept || number != 1 || !can_be_written(op, operands, 1)) return false;
      write(w, operands[0], PyTuple_GET_ITEM(outputs, 0));
      results.emplace_back(THPVariable_Unpack(operands[0].tensor));
      break;
    }
    case Result::write_list: {
      const size_t written = static_cast<size_t>(number);
      if (written > operands.size() || !can_be_written(op, operands, written)) return false;
      for (size_t i = 0; i < written; ++i) {
        write(w, operands[i], PyTuple_GET_ITEM(outputs, static_cast<Py_ssize_t>(i)));
      }
      break;
    }
  }
  count(op);
  ++w.recorded;
  return true;
}

// -- the kernel -----------------------------------------------------------------------------------

// No dispatch mode would see the op first, but for the mode that makes everything lazy: it does
// with lazy tensors what is done here.
static bool is_ours_to_record(const World& w) {
  const int64_t modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (modes == 0) return true;
  if (modes > 1) return false;
  const auto& mode = c10::impl::TorchDispatchModeTLS::get_stack_at(0);
  return Py_TYPE(mode->ptr(getPyInterpreter())) == w.lazy_mode;
}

// The op's Python recorder is still the one that this stands in front of.
static bool is_current(const World& w, const Op& op) {
  return PyDict_GetItemWithError(op.attributes, w.name_recorder) == op.recorder;
}

// The results of a call that was met before; false if it is Python's.
template <class MakeKey>
bool look_up(World& w, const Op& op, MakeKey make_key, std::vector<IValue>& results) {
  Lock lock(w);
  Call call(w, op);
  Ref key = make_key(call);
  if (!key || call.operands().empty()) return false;
  PyObject* node = PyDict_GetItemWithError(op.nodes, key.get());
  if (node == nullptr) {
    if (PyErr_Occurred()) fail();
    return false;
  }
  Ref held = Ref::to(node);
  return finish(w, op, call, node, results);
}

static bool is_lazy(const World& w, const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object != nullptr && Py_TYPE(object) == w.lazy_tensor;
}

// A lazy tensor is among the arguments. If none is, whoever holds the lock may wait for this call.
static bool any_lazy(const World& w, const Op& op, c10::ArrayRef<IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.kinds[i] == Kind::tensor && arguments[i].isTensor()) {
      if (is_lazy(w, arguments[i].toTensor())) return true;
    } else if (op.kinds[i] == Kind::tensors && arguments[i].isTensorList()) {
      for (const IValue& item : arguments[i].toListRef()) {
        if (is_lazy(w, item.toTensor())) return true;
      }
    }
  }
  return false;
}

static bool record(World& w, const OperatorHandle& handle, Stack* stack) {
  const auto found = w.ops.find(handle);
  if (found == w.ops.end() || !is_ours_to_record(w)) return false;
  const Op& op = *found->second;
  if (!is_current(w, op)) return false;
  std::vector<IValue> results;
  const auto arguments = torch::jit::last(*stack, op.kinds.size());
  if (!any_lazy(w, op, arguments)) return false;
  if (!look_up(w, op, [&](Call& call) { return call.key(arguments); }, results)) return false;
  torch::jit::drop(*stack, op.kinds.size());
  for (IValue& result : results) stack->push_back(std::move(result));
  return true;
}

static void kernel(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  World& w = world();
  if (w.on) {
    Gil gil;
    if (record(w, op, stack)) return;
    ++w.passed_on;
  }
  w.in_python->callBoxed(op, keys, stack);
}

// The kernel above autograd of an op that stays whole. What saves for backward what the parts would
// save, and what saves nothing, is whole; the rest is for Python.
static void whole_kernel(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const World& w = world();
  const Whole& kernels = w.whole_ops.at(op);
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto needs = [&](size_t i) {
    return i < arguments.size() && arguments[i].isTensor() &&
        arguments[i].toTensor().requires_grad();
  };
  const bool both = needs(0) && needs(1);
  const bool none = !(needs(0) || needs(1) || needs(2)) || !c10::GradMode::is_enabled();
  const bool whole = w.on && !w.parts && (both || none);
  (whole ? kernels.whole : kernels.python).callBoxed(op, keys, stack);
}

// -- what Python calls ----------------------------------------------------------------------------

// `LazyTensor.__torch_dispatch__`. torch calls it with no kernel in between where it makes an alias
// of a tensor for its own use, once for each gradient it keeps.
static PyObject* record_alias(PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  World& w = world();
  if (arguments[1] != w.detach || !w.on || w.detach_op == nullptr) return nullptr;
  PyObject* keywords = number == 5 ? arguments[4] : Py_None;
  const bool no_keywords =
      keywords == Py_None || (PyDict_CheckExact(keywords) && PyDict_GET_SIZE(keywords) == 0);
  const bool one = PyTuple_CheckExact(arguments[3]) && PyTuple_GET_SIZE(arguments[3]) == 1;
  PyObject* tensor = one ? PyTuple_GET_ITEM(arguments[3], 0) : Py_None;
  if (!no_keywords || Py_TYPE(tensor) != w.lazy_tensor || !is_current(w, *w.detach_op)) {
    return nullptr;
  }
  std::vector<IValue> results;
  const auto make_key = [&](Call& call) { return call.key_of_one(tensor); };
  if (look_up(w, *w.detach_op, make_key, results)) return THPVariable_Wrap(results[0].toTensor());
  ++w.passed_on;
  return nullptr;
  END_HANDLE_TH_ERRORS
}

static PyObject* dispatch(
    PyObject*, PyObject* const* arguments, Py_ssize_t number, PyObject* names) {
  if (names == nullptr && (number == 4 || number == 5)) {  // cls, func, types, args, kwargs
    PyObject* result = record_alias(arguments, number);
    if (result != nullptr || PyErr_Occurred()) return result;
  }
  return PyObject_Vectorcall(world().dispatch, arguments, static_cast<size_t>(number), names);
}

static PyObject* take(PyObject* names, const char* name) {  // kept for good
  PyObject* found = PyDict_GetItemString(names, name);
  if (found == nullptr) {
    PyErr_Format(PyExc_KeyError, "%s", name);
    fail();
  }
  return Py_NewRef(found);
}

static PyTypeObject* take_type(PyObject* names, const char* name) {
  return reinterpret_cast<PyTypeObject*>(take(names, name));
}

static void find_slots(World& w, PyObject* names) {
  const auto find = [&](Slot& slot, const char* type, const char* name) {
    slot.find(PyDict_GetItemString(names, type), name);
  };
  find(w.storage_type, "LazyStorage", "type");
  find(w.storage_value, "LazyStorage", "value");
  find(w.storage_data, "LazyStorage", "data");
  find(w.storage_listed, "LazyStorage", "listed");
  find(w.view_base, "View", "base");
  find(w.view_index, "View", "index");
  find(w.view_node, "View", "node");
  find(w.view_parent, "View", "parent");
  find(w.view_value, "View", "value");
  find(w.node_outputs, "Node", "outputs");
  find(w.node_passing, "Node", "passing");
  find(w.expansion_outputs, "Expansion", "outputs");
  find(w.value_type, "Value", "type");
  find(w.value_index, "Value", "index");
  find(w.type_wrapper, "TensorType", "wrapper");
  find(w.type_conj, "TensorType", "conj");
  find(w.type_neg, "TensorType", "neg");
}

// setup(names): the classes and functions of torpor that are used here.
static PyObject* setup(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  World& w = world();
  w.lazy_tensor = take_type(names, "LazyTensor");
  w.lazy_storage = take_type(names, "LazyStorage");
  w.view = take_type(names, "View");
  w.lazy_mode = take_type(names, "LazyMode");
  w.node = take_type(names, "Node");
  w.expansion = take_type(names, "Expansion");
  w.tensor_type = take_type(names, "TensorType");
  w.symbolic_type = take_type(names, "SymbolicType");
  take(names, "Value");
  find_slots(w, names);
  w.trace = take(names, "trace");
  w.trace_builder.find(reinterpret_cast<PyObject*>(Py_TYPE(w.trace)), "builder");
  w.builder = take_type(names, "IrBuilder");
  w.leaf_nodes = take(names, "leaf_nodes");
  w.leaves = take(names, "leaves");
  w.leaf_storages = take(names, "leaf_storages");
  w.leaf_values = take(names, "leaf_values");
  w.sizes = take(names, "sizes");
  w.name_active = PyUnicode_InternFromString("active");
  w.acquire = take(names, "acquire");
  w.release = take(names, "release");
  w.pending = take(names, "pending");
  w.forget = take(names, "forget");
  w.leaf_value = take(names, "leaf_value");
  w.config = take(names, "config");
  w.make_wrapper = take(names, "make_wrapper");
  w.dispatch = take(names, "dispatch");
  w.detach = take(names, "detach");
  w.numbers = {
      take(names, "zero"), take(names, "negative_zero"), take(names, "nan"),
      PyUnicode_InternFromString("int"), PyUnicode_InternFromString("bool")};
  w.name_storage = PyUnicode_InternFromString("_lazy_storage");
  w.name_view = PyUnicode_InternFromString("_lazy_view");
  w.name_recorder = PyUnicode_InternFromString("_torpor_record");
  w.name_limit = PyUnicode_InternFromString("max_trace_nodes");
  // an op that never gets a kernel of ours: under `Python` it has the one that torch has for all
  w.in_python = c10::Dispatcher::singleton()
                    .findSchemaOrThrow("aten::_local_scalar_dense", "")
                    .getComputedKernelForDispatchKey(c10::DispatchKey::Python);
  w.on = true;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

static Kind plain_kind(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return Kind::dtype;
    case c10::TypeKind::LayoutType: return Kind::layout;
    case c10::TypeKind::MemoryFormatType: return Kind::memory_format;
    case c10::TypeKind::DeviceObjType: return Kind::device;
    default: return Kind::plain;
  }
}

static Kind kind_of(char letter, const c10::Argument& argument) {
  switch (letter) {
    case 't': return Kind::tensor;
    case 'T': return Kind::tensors;
    case 'p': return plain_kind(argument);
    case 'P': return Kind::plains;
    case 'n': return Kind::number;
    case 'N': return Kind::numbers;
    default: return Kind::opaque;
  }
}

// Python sees the default of such an argument as a plain integer.
static bool has_odd_default(Kind kind, const c10::Argument& argument) {
  const bool named = kind == Kind::dtype || kind == Kind::layout || kind == Kind::memory_format;
  return named && argument.default_value() && !argument.default_value()->isNone();
}

// Give an op our kernel under the dispatch key `Python`.
static void take_over(World& w, const OperatorHandle& handle) {
  const c10::OperatorName& name = handle.operator_name();
  auto& library = w.libraries[std::string(*name.getNamespace())];
  if (!library) {
    library = std::make_unique<torch::Library>(
        torch::Library::IMPL, std::string(*name.getNamespace()), c10::DispatchKey::Python, __FILE__,
        __LINE__);
  }
  library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

// add(name, overload, kinds, result, overlaps, grad_mode, grads, attributes, recorder, nodes,
// cell): record calls of an op here; False if its arguments are of a kind that is not known here.
static PyObject* add(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *name, *overload, *kinds;
  int result, overlaps, grad_mode;
  PyObject *grads, *attributes, *recorder, *nodes, *cell;
  if (!PyArg_ParseTuple(
          arguments, "sssippO!O!OO!O!", &name, &overload, &kinds, &result, &overlaps, &grad_mode,
          &PyTuple_Type, &grads, &PyDict_Type, &attributes, &recorder, &PyDict_Type, &nodes,
          &PyList_Type, &cell)) {
    return nullptr;
  }
  World& w = world();
  const OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto& schema = handle.schema().arguments();
  auto op = std::make_unique<Op>();
  for (size_t i = 0; i < schema.size(); ++i) {
    const Kind kind = kind_of(kinds[i], schema[i]);
    if (has_odd_default(kind, schema[i])) Py_RETURN_FALSE;
    op->kinds.push_back(kind);
  }
  op->result = static_cast<Result>(result);
  op->overlaps = overlaps;
  op->grad_mode = grad_mode;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grads); ++i) {
    op->grads.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(grads, i)));
  }
  op->attributes = Py_NewRef(attributes);
  op->recorder = Py_NewRef(recorder);
  op->nodes = Py_NewRef(nodes);
  op->cell = Py_NewRef(cell);
  const Op* made = op.release();
  const bool is_new = w.ops.count(handle) == 0;
  w.ops[handle] = made;
  if (is_new) take_over(w, handle);
  if (std::string(name) == "aten::detach") w.detach_op = made;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

class Quiet : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// keep_whole(name, kernel): decide here whether the op stays whole; `kernel` is what it then calls.
// False if that is no kernel that can be read here: a library built by another compiler than torch.
static PyObject* keep_whole(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char* name;
  PyObject* kernel;
  if (!PyArg_ParseTuple(arguments, "sO", &name, &kernel)) return nullptr;
  World& w = world();
  const OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  constexpr auto key = c10::DispatchKey::AutogradLazy;
  try {
    w.whole_ops.emplace(
        handle, Whole{py::handle(kernel).cast<c10::SafeKernelFunction>(),
                      handle.getComputedKernelForDispatchKey(key)});
  } catch (const py::cast_error&) {
    Py_RETURN_FALSE;
  }
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  Quiet quiet;  // it is meant to take the place of Python's
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library->impl(name, torch::CppFunction::makeFromBoxedFunction<&whole_kernel>());
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// parts(on): composite ops are taken apart from now on, or stay whole again.
static PyObject* set_parts(PyObject*, PyObject* on) {
  world().parts = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

// switch(on): record here, or leave everything to Python.
static PyObject* set_on(PyObject*, PyObject* on) {
  world().on = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

// counts(): calls recorded here, and calls handed to Python.
static PyObject* counts(PyObject*, PyObject*) {
  return Py_BuildValue("LL", (long long)world().recorded, (long long)world().passed_on);
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_O, nullptr},
    {"add", add, METH_VARARGS, nullptr},
    {"keep_whole", keep_whole, METH_VARARGS, nullptr},
    {"parts", set_parts, METH_O, nullptr},
    {"switch", set_on, METH_O, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatch)),
     METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "torpor_native", "torpor's native recorder.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace torpor

PyMODINIT_FUNC PyInit_torpor_native() { return PyModule_Create(&torpor::definition); }
