// Keys: what a call's arguments are in the table of nodes. Each is the key that the op's Python
// recorder builds (trace/recorder.py, ops/keys.py).

#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "world.h"

namespace torpor {

// A lazy tensor among the arguments; borrowed, the stack and the tensor keep it alive.
struct Operand {
  PyObject* tensor;
  Ref storage;
  Ref view;
  size_t argument;
};

// One call as it is being read.
class Call {
 public:
  Call(World& w, const Op& op, c10::ArrayRef<IValue> arguments)
      : w_(w), op_(op), arguments_(arguments) {}

  // The op's key for its arguments; null if Python has to look at them.
  Ref key();
  Ref key_of_one(PyObject* tensor);

  c10::ArrayRef<IValue> arguments() const { return arguments_; }
  const std::vector<Operand>& operands() const { return operands_; }

 private:
  PyObject* element(size_t position, const IValue& argument);
  PyObject* tensor(size_t position, const at::Tensor& argument, PyObject** slot);
  PyObject* lazy_tensor(size_t position, PyObject* tensor, PyObject** slot);
  PyObject* tensors(size_t position, const IValue& argument);
  PyObject* device(const IValue& argument);
  bool enter_leaves();
  Ref enter(PyObject* function, PyObject* object);
  Ref leaf_of_plain(const at::Tensor& tensor);
  Ref leaf_of(PyObject* storage);

  struct Leaf {
    PyObject** slot;  // where its value belongs
    size_t operand;
    const at::Tensor* plain;  // a plain tensor; null: the operand is the leaf
  };

  World& w_;
  const Op& op_;
  c10::ArrayRef<IValue> arguments_;
  std::vector<Operand> operands_;
  std::vector<Leaf> leaves_;
  bool waits_ = false;  // the element just read is a leaf, whose value comes last
};

inline PyObject* float_key(const World& w, double number) {
  if (number != number) return Py_NewRef(w.numbers.nan);
  if (number == 0.0) {
    return Py_NewRef(std::signbit(number) ? w.numbers.negative_zero : w.numbers.zero);
  }
  return PyFloat_FromDouble(number);
}

inline PyObject* int_key(const World& w, int64_t number) {
  Ref object = checked(PyLong_FromLongLong(number));
  return PyTuple_Pack(2, w.numbers.int_, object.get());
}

inline PyObject* bool_key(const World& w, bool flag) {
  return PyTuple_Pack(2, w.numbers.bool_, flag ? Py_True : Py_False);
}

// Null, with no error set, if Python has to look at it.
inline PyObject* number_key(const World& w, const IValue& number) {
  if (number.isDouble()) return float_key(w, number.toDouble());
  if (number.isInt()) return int_key(w, number.toInt());
  if (number.isBool()) return bool_key(w, number.toBool());
  return nullptr;
}

// A tensor that stands for a Python number, as `x + 2` makes it.
inline PyObject* wrapped_number_key(const World& w, const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.dim() != 0) return nullptr;
  switch (tensor.scalar_type()) {
    case at::kDouble: return float_key(w, *tensor.const_data_ptr<double>());
    case at::kLong: return int_key(w, *tensor.const_data_ptr<int64_t>());
    case at::kBool: return bool_key(w, *tensor.const_data_ptr<bool>());
    default: return nullptr;
  }
}

template <class List, class Make>
inline PyObject* tuple_of(const List& list, Make make) {
  Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(list.size())));
  Py_ssize_t place = 0;
  for (const auto& item : list) {
    PyObject* element = make(item);
    if (element == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), place++, element);
  }
  return tuple.release();
}

inline PyObject* plains(const IValue& list) {
  if (list.isIntList()) return tuple_of(list.toIntVector(), PyLong_FromLongLong);
  if (list.isBoolList()) {
    return tuple_of(list.toBoolList().vec(), [](bool item) { return PyBool_FromLong(item); });
  }
  return nullptr;
}

inline PyObject* numbers(const World& w, const IValue& list) {
  if (list.isDoubleList()) {
    return tuple_of(list.toDoubleVector(), [&](double item) { return float_key(w, item); });
  }
  if (list.isIntList()) {
    return tuple_of(list.toIntVector(), [&](int64_t item) { return int_key(w, item); });
  }
  if (!list.isList()) return nullptr;
  return tuple_of(list.toListRef(), [&](const IValue& item) { return number_key(w, item); });
}

inline PyObject* plain(const IValue& argument) {
  if (argument.isInt()) return PyLong_FromLongLong(argument.toInt());
  if (argument.isBool()) return Py_NewRef(argument.toBool() ? Py_True : Py_False);
  if (argument.isString()) {
    const std::string& text = argument.toStringRef();
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
  return nullptr;
}

// Sizes may be symbols, which are other numbers in another trace.
inline bool has_symbols(const World& w) {
  return checked(PyObject_GetAttr(w.sizes, w.name_active)).get() != Py_False;
}

// What a view shows of `value`, which the views that it is of come to; borrowed. Null, with no error
// set, if that was not met before, or is right in this trace only.
inline PyObject* replayed(const World& w, PyObject* view, PyObject* value) {
  PyObject* node = w.view_node.of(view);
  if (Py_TYPE(node) != w.node || PyTuple_GET_SIZE(w.node_operands.of(node)) != 1) return nullptr;
  PyObject* before = PyTuple_GET_ITEM(w.node_operands.of(node), 0);
  if (w.value_type.of(before) != w.value_type.of(value)) return nullptr;
  PyObject* given = w.node_key.of(node);
  Ref key = checked(PyTuple_New(PyTuple_GET_SIZE(given)));
  bool met = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    PyObject* part = PyTuple_GET_ITEM(given, i);
    met = met || part == before;
    PyTuple_SET_ITEM(key.get(), i, Py_NewRef(part == before ? value : part));
  }
  if (!met) return nullptr;
  PyObject* found = PyDict_GetItemWithError(w.kind_nodes.of(w.node_op.of(node)), key.get());
  if (found == nullptr && PyErr_Occurred()) fail();
  if (found == nullptr || Py_TYPE(found) != w.node || w.node_transient.of(found) != Py_False) {
    return nullptr;
  }
  const Py_ssize_t index = PyLong_AsSsize_t(w.view_index.of(view));
  PyObject* shown = PyTuple_GET_ITEM(w.node_outputs.of(found), index);
  return w.value_type.of(shown) == w.view_type.of(view) ? shown : nullptr;
}

// `View.move` of a view that is right in any trace.
inline void move(const World& w, PyObject* view, PyObject* root, PyObject* value) {
  w.view_value.set(view, value);
  w.view_base.set(view, root);
}

// `trace.values.replay`: what a view shows while its storage holds `root`, borrowed. Null if Python
// has to look at it.
inline PyObject* shown(const World& w, PyObject* view, PyObject* root) {
  if (w.view_base.of(view) == root) return w.view_value.of(view);
  if (Py_TYPE(root) != w.value || has_symbols(w)) return nullptr;
  std::vector<PyObject*> stale;
  PyObject* link = view;
  for (; link != Py_None && w.view_base.of(link) != root; link = w.view_parent.of(link)) {
    if (Py_TYPE(w.view_base.of(link)) != w.value) return nullptr;
    stale.push_back(link);
  }
  PyObject* value = link == Py_None ? root : w.view_value.of(link);
  for (auto each = stale.rbegin(); each != stale.rend(); ++each) {
    value = replayed(w, *each, value);
    if (value == nullptr) return nullptr;
    move(w, *each, root, value);
  }
  return value;
}

inline PyObject* Call::lazy_tensor(size_t position, PyObject* tensor, PyObject** slot) {
  Ref storage(PyObject_GetAttr(tensor, w_.name_storage));
  Ref view(storage ? PyObject_GetAttr(tensor, w_.name_view) : nullptr);
  if (!view) {
    PyErr_Clear();
    return nullptr;
  }
  if (Py_TYPE(storage.get()) != w_.lazy_storage) return nullptr;
  PyObject* value = w_.storage_value.of(storage.get());
  if (value == nullptr) return nullptr;
  if (view.get() != Py_None && Py_TYPE(view.get()) != w_.view) return nullptr;
  if (value == Py_None) {
    waits_ = true;
    leaves_.push_back({slot, operands_.size(), nullptr});
    value = nullptr;
  } else if (view.get() != Py_None) {
    value = shown(w_, view.get(), value);
    if (value == nullptr) return nullptr;
  }
  operands_.push_back({tensor, std::move(storage), std::move(view), position});
  return Py_XNewRef(value);
}

// A plain tensor of which Python makes a leaf without any dispatch mode or subclass looking on.
inline bool can_enter(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor.key_set().has(c10::DispatchKey::Python) &&
      c10::impl::TorchDispatchModeTLS::stack_len() == 0;
}

inline PyObject* Call::tensor(size_t position, const at::Tensor& argument, PyObject** slot) {
  if (!argument.defined()) return Py_NewRef(Py_None);
  PyObject* object = argument.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (object != nullptr && Py_TYPE(object) == w_.lazy_tensor) {
    return lazy_tensor(position, object, slot);
  }
  if (argument.unsafeGetTensorImpl()->is_wrapped_number()) {
    return wrapped_number_key(w_, argument);
  }
  if (can_enter(argument) && !op_.assigns) {  // a copy takes the data of a plain source at once
    waits_ = true;
    leaves_.push_back({slot, 0, &argument});
  }
  return nullptr;
}

inline PyObject* Call::tensors(size_t position, const IValue& argument) {
  if (!argument.isTensorList()) return nullptr;
  const auto list = argument.toListRef();
  Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(list.size())));
  operands_.reserve(operands_.size() + list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    PyObject** slot = &PyTuple_GET_ITEM(tuple.get(), i);
    waits_ = false;
    *slot = tensor(position, list[i].toTensor(), slot);
    if (*slot == nullptr && !waits_) return nullptr;
  }
  waits_ = false;
  return tuple.release();
}

// The device that the first argument is on; what any other means is for Python to decide.
inline PyObject* Call::device(const IValue& argument) {
  if (!argument.isDevice() || !arguments_[0].isTensor()) return nullptr;
  const at::Tensor& first = arguments_[0].toTensor();
  const c10::Device device = argument.toDevice();
  if (!first.defined() || first.device() != device || device.is_meta()) return nullptr;
  return THPDevice_New(device);
}

inline PyObject* Call::element(size_t position, const IValue& argument) {
  if (argument.isNone()) return Py_NewRef(Py_None);
  switch (op_.kinds[position]) {
    case Kind::tensors: return tensors(position, argument);
    case Kind::plain: return plain(argument);
    case Kind::plains: return plains(argument);
    case Kind::number: return number_key(w_, argument);
    case Kind::numbers: return numbers(w_, argument);
    case Kind::dtype:
      if (!argument.isInt()) return nullptr;
      return Py_NewRef(reinterpret_cast<PyObject*>(
          torch::getTHPDtype(static_cast<c10::ScalarType>(argument.toInt()))));
    case Kind::layout:
      if (!argument.isInt()) return nullptr;
      return Py_NewRef(reinterpret_cast<PyObject*>(
          torch::getTHPLayout(static_cast<c10::Layout>(argument.toInt()))));
    case Kind::memory_format:
      if (!argument.isInt()) return nullptr;
      return Py_NewRef(torch::utils::getTHPMemoryFormat(
          static_cast<c10::MemoryFormat>(argument.toInt())));
    case Kind::device: return device(argument);
    default: return nullptr;  // a generator
  }
}

inline Ref Call::key() {
  const size_t further = op_.grad_mode || !op_.grads.empty() ? 1 : 0;
  Ref key = checked(PyTuple_New(static_cast<Py_ssize_t>(arguments_.size() + further)));
  for (size_t i = 0; i < arguments_.size(); ++i) {
    PyObject** slot = &PyTuple_GET_ITEM(key.get(), i);
    waits_ = false;
    *slot = op_.kinds[i] == Kind::tensor && arguments_[i].isTensor()
        ? tensor(i, arguments_[i].toTensor(), slot)
        : element(i, arguments_[i]);
    if (*slot == nullptr && !waits_) {
      if (PyErr_Occurred()) fail();
      return Ref();
    }
  }
  if (further) {
    Ref flags = checked(PyTuple_New(static_cast<Py_ssize_t>(op_.grads.size() + op_.grad_mode)));
    Py_ssize_t place = 0;
    if (op_.grad_mode) {
      PyTuple_SET_ITEM(flags.get(), place++, PyBool_FromLong(c10::GradMode::is_enabled()));
    }
    for (size_t position : op_.grads) {
      if (!arguments_[position].isTensor()) return Ref();
      const bool needs = arguments_[position].toTensor().requires_grad();
      PyTuple_SET_ITEM(flags.get(), place++, PyBool_FromLong(needs));
    }
    PyTuple_SET_ITEM(key.get(), arguments_.size(), flags.release());
  }
  return enter_leaves() ? std::move(key) : Ref();
}

inline Ref Call::key_of_one(PyObject* tensor) {
  Ref key = checked(PyTuple_New(1));
  PyObject** slot = &PyTuple_GET_ITEM(key.get(), 0);
  *slot = lazy_tensor(0, tensor, slot);
  return (*slot != nullptr || waits_) && enter_leaves() ? std::move(key) : Ref();
}

// `Trace.leaf_value` where it finds a leaf that was met before, and nothing is to be noted besides:
// not for the first leaf of a trace, sizes that may be symbols, a backend with leaves of its own.
inline Ref known_leaf(const World& w, PyObject* storage) {
  if (w.storage_data.of(storage) == nullptr) return Ref();
  Ref held = Ref::to(w.storage_data.of(storage));  // a finalizer may run at any allocation
  Ref type = Ref::to(w.storage_type.of(storage));
  PyObject* data = held.get();
  const Py_ssize_t slot = PyList_GET_SIZE(w.leaves);
  if (data == Py_None || slot == 0) return Ref();
  PyObject* builder = w.trace_builder.of(w.trace);
  if (builder == nullptr || Py_TYPE(builder) != w.builder) return Ref();
  if (has_symbols(w)) return Ref();
  if (PyDict_GetItemWithError(w.leaf_values, data) != nullptr) return Ref();
  Ref number = checked(PyLong_FromSsize_t(slot));
  Ref key = checked(PyTuple_Pack(2, number.get(), type.get()));
  PyObject* node = PyDict_GetItemWithError(w.leaf_nodes, key.get());
  if (node == nullptr || Py_TYPE(node) != w.node) return Ref();
  Ref value = Ref::to(PyTuple_GET_ITEM(w.node_outputs.of(node), 0));
  Ref entry = checked(PyTuple_Pack(2, storage, value.get()));
  if (PyList_GET_SIZE(w.leaves) != slot || w.storage_data.of(storage) != data ||
      w.storage_value.of(storage) != Py_None) {
    return Ref();  // a finalizer has recorded something
  }
  if (PyDict_SetItem(w.leaf_values, data, value.get()) < 0 ||
      PyList_Append(w.leaves, data) < 0 || PyList_Append(w.leaf_storages, entry.get()) < 0) {
    fail();
  }
  w.storage_value.set(storage, value.get());
  return value;
}

// The value of a new leaf; null if Python has to look at it.
inline Ref Call::enter(PyObject* function, PyObject* object) {
  Ref value(PyObject_CallOneArg(function, object));
  if (!value) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) fail();  // an interrupt comes only once
    PyErr_Clear();  // Python meets the same error, and says so
  }
  return value;
}

inline Ref Call::leaf_of_plain(const at::Tensor& tensor) {
  Ref object = checked(THPVariable_Wrap(tensor));
  return enter(w_.plain_value, object.get());
}

// What enters the trace with this call is numbered, in the order of arguments.
inline bool Call::enter_leaves() {
  for (const Leaf& leaf : leaves_) {
    if (leaf.plain != nullptr) {
      *leaf.slot = leaf_of_plain(*leaf.plain).release();
      if (*leaf.slot == nullptr) return false;
      continue;
    }
    const Operand& operand = operands_[leaf.operand];
    Ref root = leaf_of(operand.storage.get());
    if (!root) return false;
    const bool is_view = operand.view.get() != Py_None;
    PyObject* value = is_view ? shown(w_, operand.view.get(), root.get()) : root.get();
    if (value == nullptr) return false;
    *leaf.slot = Py_NewRef(value);
  }
  return true;
}

// What a storage enters the trace as; null if Python has to look at it.
inline Ref Call::leaf_of(PyObject* storage) {
  PyObject* value = w_.storage_value.of(storage);
  if (value != nullptr && value != Py_None) return Ref::to(value);  // it stands twice among them
  Ref known = known_leaf(w_, storage);
  if (known) return known;
  if (PyErr_Occurred()) fail();
  return enter(w_.leaf_value, storage);
}

}  // namespace torpor
