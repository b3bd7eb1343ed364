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

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include "adam.h"
#include "cuts.h"
#include "keys.h"
#include "modules.h"
#include "optimizers.h"
#include "regions.h"
#include "tape.h"

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

// The tensor behind a lazy tensor. torch makes aliases of tensors for its own use, one for each result
// that it keeps for backward, and asks the tensor itself for them.
class LazyImpl final : public c10::TensorImpl {
 public:
  LazyImpl(c10::Storage&& memory, c10::DispatchKeySet keys, const caffe2::TypeMeta dtype)
      : c10::TensorImpl(std::move(memory), keys, dtype) {}

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool may_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool may_change) const override;

 private:
  c10::intrusive_ptr<c10::TensorImpl> recorded_alias() const;  // null if it is Python's
};

// A tensor with no memory, as `_make_wrapper_subclass` makes it.
static at::Tensor bare_tensor(const Wrapper& like) {
  c10::Storage memory(
      c10::Storage::use_byte_size_t{}, like.nbytes, at::DataPtr(nullptr, like.device),
      c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  at::Tensor tensor =
      at::detail::make_tensor<LazyImpl>(std::move(memory), like.keys, like.dtype);
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

static Ref fresh_storage(const World& w, PyObject* value) {
  Ref storage = checked(w.lazy_storage->tp_alloc(w.lazy_storage, 0));
  w.storage_type.set(storage.get(), w.value_type.of(value));
  w.storage_value.set(storage.get(), value);
  w.storage_data.set(storage.get(), Py_None);
  enlist(w, storage.get());
  return storage;
}

static at::Tensor fresh_tensor(World& w, PyObject* value) {
  at::Tensor tensor = bare_tensor(wrapper_of(w, w.value_type.of(value)));
  Ref storage = fresh_storage(w, value);
  ++w.made;
  return as_lazy_tensor(w, std::move(tensor), storage.get(), Py_None);
}

// region_storages(values): new storages that hold them.
static PyObject* region_storages(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  const World& w = world();
  cuts::expect(values, &PyTuple_Type);
  Ref made = checked(PyList_New(PyTuple_GET_SIZE(values)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); ++i) {
    PyList_SET_ITEM(made.get(), i, fresh_storage(w, PyTuple_GET_ITEM(values, i)).release());
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}

static Ref whole_tensor(World& w, PyObject* storage) {
  cuts::expect(storage, w.lazy_storage);
  at::Tensor tensor = bare_tensor(wrapper_of(w, w.storage_type.of(storage)));
  return checked(THPVariable_Wrap(as_lazy_tensor(w, std::move(tensor), storage, Py_None)));
}

// The storage that something a region knows is on.
static Ref storage_of(const World& w, PyObject* item) {
  if (Py_TYPE(item) == w.lazy_storage) return Ref::to(item);
  if (Py_TYPE(item) == w.kept_view) return Ref::to(w.kept_storage.of(item));
  return checked(PyObject_GetAttr(item, w.name_storage));
}

static Ref kept(const World& w, PyObject* storage, PyObject* look) {
  Ref view = checked(w.kept_view->tp_alloc(w.kept_view, 0));
  w.kept_storage.set(view.get(), storage);
  w.kept_look.set(view.get(), look);
  return view;
}

// A tensor that looks at a storage as a `ResultLook` says; null if it has conjugate or negative bits.
static Ref looking(World& w, PyObject* storage, PyObject* look) {
  PyObject* type = w.value_type.of(PyTuple_GET_ITEM(look, regions::kLookValue));
  if (w.type_conj.of(type) != Py_False || w.type_neg.of(type) != Py_False) return Ref();
  PyObject* links = PyTuple_GET_ITEM(look, regions::kLookLinks);
  Ref view = Ref::to(Py_None);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(links); ++i) {
    PyObject* link = PyTuple_GET_ITEM(links, i);  // node, index, value
    Ref next = checked(w.view->tp_alloc(w.view, 0));
    w.view_parent.set(next.get(), view.get());
    w.view_node.set(next.get(), PyTuple_GET_ITEM(link, 0));
    w.view_index.set(next.get(), PyTuple_GET_ITEM(link, 1));
    w.view_value.set(next.get(), PyTuple_GET_ITEM(link, 2));
    w.view_type.set(next.get(), w.type_concrete.of(w.value_type.of(PyTuple_GET_ITEM(link, 2))));
    w.view_base.set(next.get(), PyTuple_GET_ITEM(look, regions::kLookRoot));
    view = std::move(next);
  }
  at::Tensor tensor = bare_tensor(wrapper_of(w, type));
  return checked(THPVariable_Wrap(as_lazy_tensor(w, std::move(tensor), storage, view.get())));
}

// region_results(storages, results, shown, args): what a call of a region gives, as `RegionCall` says;
// results from `shown` on are for the backward graph alone. None if Python has to make them.
static PyObject* region_results(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  World& w = world();
  PyObject *storages, *results, *args;
  Py_ssize_t shown;
  if (!PyArg_ParseTuple(
          given, "O!O!nO!", &PyList_Type, &storages, &PyTuple_Type, &results, &shown, &PyList_Type,
          &args)) {
    return nullptr;
  }
  const auto of = [&](Py_ssize_t place) {  // borrowed
    PyObject* found = place < 0 ? PyList_GetItem(args, PyList_GET_SIZE(args) + place)
                                : PyList_GetItem(storages, place);
    if (found == nullptr) fail();
    return found;
  };
  Ref made = checked(PyList_New(PyTuple_GET_SIZE(results)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
    PyObject* one = PyTuple_GET_ITEM(results, i);
    Ref result;
    if (one == Py_None) {
      result = Ref::to(Py_None);
    } else if (PyLong_CheckExact(one)) {
      const Py_ssize_t place = PyLong_AsSsize_t(one);
      if (place >= 0 && i < shown) result = whole_tensor(w, of(place));
      else result = Ref::to(of(place));
    } else {
      PyObject* source = of(PyLong_AsSsize_t(PyTuple_GET_ITEM(one, regions::kLookStorage)));
      Ref storage = storage_of(w, source);
      result = i < shown ? looking(w, storage.get(), one) : kept(w, storage.get(), one);
    }
    if (!result) Py_RETURN_NONE;
    PyList_SET_ITEM(made.get(), i, result.release());
  }
  return made.release();
  END_HANDLE_TH_ERRORS
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
  PyObject* type = w.value_type.of(value);
  at::Tensor tensor = bare_view(w, operand, type);
  Ref view = checked(w.view->tp_alloc(w.view, 0));
  w.view_parent.set(view.get(), operand.view.get());
  w.view_node.set(view.get(), node);
  w.view_index.set(view.get(), w.value_index.of(value));
  w.view_type.set(view.get(), w.type_concrete.of(type));
  w.view_value.set(view.get(), value);
  w.view_base.set(view.get(), w.storage_value.of(operand.storage.get()));
  return as_lazy_tensor(w, std::move(tensor), operand.storage.get(), view.get());
}

static at::Tensor alias_tensor(World& w, const Operand& operand, PyObject* value) {
  at::Tensor tensor = bare_view(w, operand, w.value_type.of(value));
  return as_lazy_tensor(w, std::move(tensor), operand.storage.get(), operand.view.get());
}

// What is written to, and what a write through its view comes to: an entry of `values.SCATTERS`.
struct Target {
  const Operand* operand;
  Ref scattered;  // null: it is no view
};

static void write(const World& w, const Target& target, PyObject* value) {
  PyObject* storage = target.operand->storage.get();
  PyObject* found = target.scattered.get();
  const Py_ssize_t links = found == nullptr ? 0 : PyTuple_GET_SIZE(found) - 1;
  PyObject* root = found == nullptr ? value : PyTuple_GET_ITEM(found, links);
  write(w, storage, root);
  PyObject* link = target.operand->view.get();
  for (Py_ssize_t i = 0; i < links; ++i, link = w.view_parent.of(link)) {
    move(w, link, root, PyTuple_GET_ITEM(found, i));
  }
}

// -- hits -----------------------------------------------------------------------------------------

// The values that a hit gives; null if it is not what is known here.
static PyObject* outputs_of(const World& w, PyObject* node) {
  PyObject* outputs = nullptr;
  if (Py_TYPE(node) == w.node) outputs = w.node_outputs.of(node);
  else if (Py_TYPE(node) == w.expansion) outputs = w.expansion_outputs.of(node);
  return outputs != nullptr && PyTuple_CheckExact(outputs) ? outputs : nullptr;
}

// The type of one of those values; None stands for a result that the op does not have this time.
static PyObject* type_of(const World& w, PyObject* value) {
  return Py_TYPE(value) == w.value ? w.value_type.of(value) : Py_None;
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

// None stands for a result that an op of several does not have this time.
static bool can_be_fresh(const World& w, const Op& op, const Return& made, PyObject* type) {
  return is_tensor_type(w, type) ||
      (type == Py_None && !made.is_list && op.returns.size() > 1);
}

// Views that are right in this trace only, and those with conjugate or negative bits, are Python's.
static bool can_be_view(const World& w, PyObject* node, PyObject* type) {
  return Py_TYPE(node) == w.node && w.node_transient.of(node) == Py_False &&
      is_tensor_type(w, type) && w.type_conj.of(type) == Py_False &&
      w.type_neg.of(type) == Py_False;
}

// The one lazy tensor that is an argument; null if that is something else.
static const Operand* operand_at(const std::vector<Operand>& operands, size_t argument) {
  const auto found = std::find_if(operands.begin(), operands.end(), [&](const Operand& operand) {
    return operand.argument == argument;
  });
  return found == operands.end() ? nullptr : &*found;
}

// The node's first outputs, up to `number`, can become the results.
static bool can_be_results(
    const World& w, const Op& op, const Call& call, PyObject* node, PyObject* outputs,
    Py_ssize_t number) {
  const Py_ssize_t listed = number - op.alone;
  if (op.has_list ? listed < 0 : listed != 0) return false;
  Py_ssize_t place = 0;
  for (const Return& made : op.returns) {
    if (made.make == Make::argument || made.make == Make::length) continue;
    const bool fresh = made.make == Make::fresh;
    if (!fresh && operand_at(call.operands(), made.argument) == nullptr) return false;
    for (const Py_ssize_t end = place + (made.is_list ? listed : 1); place < end; ++place) {
      PyObject* type = type_of(w, PyTuple_GET_ITEM(outputs, place));
      if (!(fresh ? can_be_fresh(w, op, made, type) : can_be_view(w, node, type))) return false;
    }
  }
  return !op.has_fresh || has_room(w, number);
}

static size_t number_of_tensors(const IValue& argument) {
  if (argument.isTensor()) return argument.toTensor().defined() ? 1 : 0;
  if (!argument.isTensorList()) return 0;
  const auto list = argument.toListRef();
  return std::count_if(
      list.begin(), list.end(), [](const IValue& item) { return item.toTensor().defined(); });
}

using Targets = std::vector<Target>;

// What is written to; false if Python has to look at it.
static bool find_targets(const Op& op, const Call& call, Targets& targets) {
  for (const Written& written : op.written) {
    const size_t before = targets.size();
    for (const Operand& operand : call.operands()) {
      if (operand.argument == written.argument) targets.push_back({&operand, Ref()});
    }
    const size_t expected = number_of_tensors(call.arguments()[written.argument]);
    if (targets.size() - before != expected) return false;  // there is a number among them
  }
  return true;
}

// Nothing is written twice, and what is written shares its storage with nothing else.
static bool are_apart(const Op& op, const Call& call, const Targets& targets) {
  for (const Written& written : op.written) {
    if (op.kinds[written.argument] != Kind::tensor) continue;
    const Operand* target = operand_at(call.operands(), written.argument);
    for (const Operand& other : call.operands()) {
      if (target == nullptr || &other == target) continue;
      if (other.storage.get() != target->storage.get()) continue;
      const bool itself = other.tensor == target->tensor && written.may_repeat;
      if (!itself || op.kinds[other.argument] == Kind::tensors) return false;
    }
  }
  if (targets.size() < 2) return true;
  std::vector<PyObject*> storages;
  for (const Target& target : targets) storages.push_back(target.operand->storage.get());
  std::sort(storages.begin(), storages.end());
  if (std::adjacent_find(storages.begin(), storages.end()) != storages.end()) return false;
  const auto is_read = [&](const Operand& operand) {
    return std::binary_search(storages.begin(), storages.end(), operand.storage.get());
  };
  const auto& operands = call.operands();
  return static_cast<size_t>(std::count_if(operands.begin(), operands.end(), is_read)) ==
      targets.size();
}

// `values.scatter`, where it was met before. Null: Python has to do it.
static Ref scattered(const World& w, const Operand& operand, PyObject* value) {
  PyObject* root = w.storage_value.of(operand.storage.get());
  std::vector<PyObject*> parts{root, value};
  PyObject* link = operand.view.get();
  for (; link != Py_None; link = w.view_parent.of(link)) {
    PyObject* outputs = outputs_of(w, w.view_node.of(link));
    if (w.view_base.of(link) != root || outputs == nullptr) return Ref();
    parts.push_back(PyTuple_GET_ITEM(outputs, PyLong_AsSsize_t(w.view_index.of(link))));
  }
  if (has_symbols(w)) return Ref();
  Ref key = checked(PyTuple_New(static_cast<Py_ssize_t>(parts.size())));
  for (size_t i = 0; i < parts.size(); ++i) {
    PyTuple_SET_ITEM(key.get(), static_cast<Py_ssize_t>(i), Py_NewRef(parts[i]));
  }
  PyObject* found = PyDict_GetItemWithError(w.scatters, key.get());
  if (found == nullptr && PyErr_Occurred()) fail();
  return Ref(Py_XNewRef(found));
}

// What is written has the type of what was there: it is not resized.
static bool can_be_written(
    const World& w, Targets& targets, PyObject* outputs, Py_ssize_t place) {
  for (Target& target : targets) {
    PyObject* value = PyTuple_GET_ITEM(outputs, place++);
    PyObject* view = target.operand->view.get();
    const bool is_whole = view == Py_None;
    PyObject* before =
        is_whole ? w.storage_value.of(target.operand->storage.get()) : w.view_value.of(view);
    if (type_of(w, before) != type_of(w, value)) return false;
    if (is_whole) continue;
    target.scattered = scattered(w, *target.operand, value);
    if (!target.scattered) return false;
  }
  return true;
}

// A copy of this key needs no node (`recorder.is_assignment`).
static bool is_assignment(const World& w, PyObject* key) {
  PyObject* type = type_of(w, PyTuple_GET_ITEM(key, 1));
  return is_tensor_type(w, type) && type == type_of(w, PyTuple_GET_ITEM(key, 0)) &&
      w.type_injective.of(type) == Py_True;
}

// A window onto all of a storage is a view of the tensor that is all of it; others are Python's.
static bool is_view_of_all(const World& w, const Call& call, PyObject* outputs) {
  const Operand& operand = call.operands()[0];
  PyObject* type = type_of(w, PyTuple_GET_ITEM(outputs, 0));
  return operand.view.get() == Py_None && call.arguments()[3].isInt() &&
      type != w.type_concrete.of(w.storage_type.of(operand.storage.get()));
}

static void count(const Op& op) {
  const long long calls = PyLong_AsLongLong(PyList_GET_ITEM(op.calls, 0));
  PyList_SetItem(op.calls, 0, checked(PyLong_FromLongLong(calls + 1)).release());
}

static at::Tensor result(
    World& w, const Return& made, const Call& call, PyObject* node, PyObject* value) {
  if (made.make == Make::fresh) {
    return type_of(w, value) == Py_None ? at::Tensor() : fresh_tensor(w, value);
  }
  const Operand& operand = *operand_at(call.operands(), made.argument);
  return made.make == Make::alias ? alias_tensor(w, operand, value)
                                  : view_tensor(w, operand, node, value);
}

static c10::TensorImpl* written_by(const Target& target) {
  return THPVariable_Unpack(target.operand->tensor).unsafeGetTensorImpl();
}

// Inference tensors have no versions. What else has none, a view of one, is not written to outside
// inference mode: Python says so.
static bool can_raise_versions(const Targets& targets) {
  return c10::InferenceMode::is_enabled() ||
      std::all_of(targets.begin(), targets.end(), [](const Target& target) {
           auto* written = written_by(target);
           return written->is_inference() || written->version_counter().enabled();
         });
}

static void raise_version(const Target& target) {
  auto* written = written_by(target);
  if (!written->is_inference()) written->bump_version();
}

// Makes the results of a hit and writes what it writes; nothing has happened if it says that it
// could not. The outputs of a node are its results that are new, then what it writes.
static bool finish(
    World& w, const Op& op, const Call& call, PyObject* node, PyObject* outputs, bool first,
    Stack& results) {
  Targets targets;
  if (!op.written.empty() &&
      !(find_targets(op, call, targets) && are_apart(op, call, targets))) {
    return false;
  }
  const Py_ssize_t made = PyTuple_GET_SIZE(outputs) - static_cast<Py_ssize_t>(targets.size());
  if (!can_be_results(w, op, call, node, outputs, made) ||
      !can_be_written(w, targets, outputs, made) ||
      (op.bumps && !can_raise_versions(targets))) {
    return false;
  }
  Py_ssize_t place = 0;
  for (const Return& returned : op.returns) {
    if (returned.make == Make::argument) {
      results.push_back(call.arguments()[returned.argument]);
    } else if (returned.make == Make::length) {
      results.emplace_back(call.arguments()[returned.argument].toTensor().size(2));
    } else if (first && place > 0 && !returned.is_list && returned.make == Make::fresh) {
      results.emplace_back(at::Tensor());  // nobody wants it
      ++place;
    } else if (returned.is_list) {
      c10::List<at::Tensor> list;
      for (const Py_ssize_t end = place + made - op.alone; place < end; ++place) {
        list.push_back(result(w, returned, call, node, PyTuple_GET_ITEM(outputs, place)));
      }
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(result(w, returned, call, node, PyTuple_GET_ITEM(outputs, place++)));
    }
  }
  for (const Target& target : targets) {
    write(w, target, PyTuple_GET_ITEM(outputs, place++));
    if (op.bumps) raise_version(target);
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

// The node under a key; null if there is none.
static Ref node_of(const Op& op, PyObject* key) {
  PyObject* node = PyDict_GetItemWithError(op.nodes, key);
  if (node != nullptr) return Ref::to(node);
  if (PyErr_Occurred()) fail();
  if (op.promoted == Py_None) return Ref();
  Ref found = checked(PyObject_CallOneArg(op.promoted, key));
  return found.get() == Py_None ? Ref() : std::move(found);
}

// The results of a call that was met before, or the first; false if it is Python's.
template <class MakeKey>
bool look_up(
    World& w, const Op& op, c10::ArrayRef<IValue> arguments, MakeKey make_key, bool first,
    Stack& results) {
  Lock lock(w);
  Call call(w, op, arguments);
  Ref key = make_key(call);
  if (!key || call.operands().empty()) return false;
  if (op.assigns && is_assignment(w, key.get())) {
    Ref written = checked(PyTuple_Pack(1, PyTuple_GET_ITEM(key.get(), 1)));
    return finish(w, op, call, Py_None, written.get(), first, results);
  }
  Ref node = node_of(op, key.get());
  PyObject* outputs = node ? outputs_of(w, node.get()) : nullptr;
  if (outputs == nullptr || (op.is_window && !is_view_of_all(w, call, outputs))) return false;
  return finish(w, op, call, node.get(), outputs, first, results);
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

// The op of which the call that this thread is about to make wants the first result alone.
static thread_local const OperatorHandle* wanted_first = nullptr;

class FirstResult {
 public:
  explicit FirstResult(const OperatorHandle* op) { wanted_first = op; }
  FirstResult(const FirstResult&) = delete;
  FirstResult& operator=(const FirstResult&) = delete;
  ~FirstResult() { wanted_first = nullptr; }
};

static bool record(World& w, const OperatorHandle& handle, bool first, Stack* stack) {
  const auto found = w.ops.find(handle);
  if (found == w.ops.end() || !is_ours_to_record(w)) return false;
  const Op& op = *found->second;
  if (!is_current(w, op)) return false;
  Stack results;
  const auto arguments = torch::jit::last(*stack, op.kinds.size());
  if (!any_lazy(w, op, arguments)) return false;
  const auto make_key = [](Call& call) { return call.key(); };
  if (!look_up(w, op, arguments, make_key, first, results)) return false;
  torch::jit::drop(*stack, op.kinds.size());
  for (IValue& result : results) stack->push_back(std::move(result));
  return true;
}

// Plain tensors that were taken in for a call are known until it is over: Python, if the call comes
// to it, makes no other leaves of them.
class Entered {
 public:
  explicit Entered(const World& w) : w_(w) {}
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {
    Gil gil;
    if (PyList_GET_SIZE(w_.entered) > 0) PyList_SetSlice(w_.entered, 0, PY_SSIZE_T_MAX, nullptr);
  }

 private:
  const World& w_;
};

static void kernel(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  World& w = world();
  const OperatorHandle* wanted = std::exchange(wanted_first, nullptr);  // calls inside want all
  std::optional<Entered> entered;
  if (w.on) {
    Gil gil;
    entered.emplace(w);
    if (record(w, op, wanted != nullptr && *wanted == op, stack)) return;
    ++w.passed_on;
  }
  w.in_python->callBoxed(op, keys, stack);
}

// -- aliases that torch makes for itself ----------------------------------------------------------

c10::intrusive_ptr<c10::TensorImpl> LazyImpl::recorded_alias() const {
  World& w = world();
  if (!w.on || c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return {};
  Gil gil;
  PyObject* object = pyobj_slot()->load_pyobj();
  const Op* op = w.detach_op;
  if (object == nullptr || Py_TYPE(object) != w.lazy_tensor || op == nullptr) return {};
  if (!is_ours_to_record(w) || !is_current(w, *op)) return {};
  Stack results;
  const auto make_key = [&](Call& call) { return call.key_of_one(object); };
  if (!look_up(w, *op, {}, make_key, false, results)) return {};
  return results[0].toTensor().getIntrusivePtr();
}

static void keep_version(
    c10::TensorImpl& made, const c10::VariableVersion& version, bool may_change) {
  if (made.is_inference()) return;
  made.set_version_counter(version);
  made.set_allow_tensor_metadata_change(may_change);
}

c10::intrusive_ptr<c10::TensorImpl> LazyImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool may_change) const {
  auto made = recorded_alias();
  if (!made) return c10::TensorImpl::shallow_copy_and_detach(version, may_change);
  keep_version(*made, version, may_change);
  return made;
}

c10::intrusive_ptr<c10::TensorImpl> LazyImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool may_change) const {
  auto made = recorded_alias();
  if (!made) return c10::TensorImpl::shallow_copy_and_detach(std::move(version), may_change);
  keep_version(*made, version, may_change);
  return made;
}

// -- kernels above autograd -----------------------------------------------------------------------

// What becomes of a call: the kernel of the usual case, the op's parts, or Python's kernel.
enum class Way { usual, parts, python };

// Each says which way a call goes. `native.attach.above_autograd` names their ops.
using Rule = Way (*)(const World&, c10::ArrayRef<IValue>);

static bool needs_gradient(c10::ArrayRef<IValue> arguments, size_t position) {
  return position < arguments.size() && arguments[position].isTensor() &&
      arguments[position].toTensor().requires_grad();
}

// A composite op stays whole (overrides/whole.py): what saves for backward what the parts would save,
// and what saves nothing.
static bool is_whole(const World& w, c10::ArrayRef<IValue> arguments) {
  const auto needs = [&](size_t position) { return needs_gradient(arguments, position); };
  const bool both = needs(0) && needs(1);
  const bool none = !(needs(0) || needs(1) || needs(2)) || !c10::GradMode::is_enabled();
  return !w.parts && (both || none) && is_lazy(w, arguments[0].toTensor());
}

static Way of_linear(const World& w, c10::ArrayRef<IValue> arguments) {
  return is_whole(w, arguments) ? Way::usual : Way::parts;
}

// A batch of one that meets a larger one is expanded first: `composites.expanded_batch`.
static Way of_matmul(const World& w, c10::ArrayRef<IValue> arguments) {
  if (is_whole(w, arguments)) return Way::usual;
  const at::Tensor &one = arguments[0].toTensor(), &other = arguments[1].toTensor();
  const bool batches = one.dim() == 3 && other.dim() == 3 && one.size(0) != other.size(0);
  return batches && (one.size(0) == 1 || other.size(0) == 1) ? Way::python : Way::parts;
}

// `to(self, *, dtype, layout, device, ...)`: a lazy tensor stays on its device.
static Way of_to(const World& w, c10::ArrayRef<IValue> arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  const IValue& device = arguments[3];
  const bool stays =
      is_lazy(w, self) && (device.isNone() || device.toDevice() == self.device());
  return stays ? Way::usual : Way::python;
}

// `dropout(input, p, train)`: nothing is dropped.
static Way of_dropout(const World&, c10::ArrayRef<IValue> arguments) {
  if (!arguments[1].isDouble()) return Way::python;
  const double p = arguments[1].toDouble();
  const bool drops_nothing = p == 0 || (!arguments[2].toBool() && p > 0 && p <= 1);
  return drops_nothing ? Way::usual : Way::python;
}

template <Rule rule>
static void above_kernel(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const World& w = world();
  const Above& kernels = w.above.at(op);
  const size_t number = op.schema().arguments().size();
  const Way way = w.on ? rule(w, torch::jit::last(*stack, number)) : Way::python;
  if (way == Way::python) {
    kernels.python.callBoxed(op, keys, stack);
  } else if (way == Way::parts) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  } else if (kernels.usual) {
    kernels.usual->callBoxed(op, keys, stack);
  } else {
    torch::jit::drop(*stack, number - 1);
  }
}

// -- ops that take the first result of another one ---------------------------------------------------

// Autograd keeps other results of the inner call for backward, or takes the tangents of the first
// from them.
static bool differentiates(c10::ArrayRef<IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return false;
    const at::Tensor& tensor = argument.toTensor();
    return (tensor.requires_grad() && c10::GradMode::is_enabled()) ||
        tensor._fw_grad(/*level=*/0).defined();
  });
}

static void first_result_kernel(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const World& w = world();
  const FirstOf& first = w.firsts.at(op);
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  FirstResult wanted(w.on && !differentiates(arguments) ? &first.inner : nullptr);
  first.composite.callBoxed(op, keys, stack);
}

// -- choices: an op that comes to another one, by the types of its arguments -----------------------

// All that a choice depends on, as bytes.
class ChoiceKey {
 public:
  explicit ChoiceKey(const World& w) : w_(w) {
    auto& context = at::globalContext();
    add(c10::GradMode::is_enabled());
    add(context.userEnabledFlashSDP());
    add(context.userEnabledMathSDP());
    add(context.userEnabledOverrideableSDP());
    add(context.userEnabledMemEfficientSDP());
    add(context.userEnabledCuDNNSDP());
    add(context.deterministicAlgorithms());
    add(context.deterministicAlgorithmsWarnOnly());
    for (const auto backend : context.sDPPriorityOrder()) add(backend);
  }

  bool add_all(c10::ArrayRef<IValue> arguments) {  // false if Python has to look at them
    return std::all_of(
        arguments.begin(), arguments.end(), [&](const IValue& each) { return add_argument(each); });
  }
  const std::string& bytes() const { return bytes_; }

 private:
  template <class T>
  void add(T part) {
    const auto number = static_cast<int64_t>(part);
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  bool add_argument(const IValue& argument) {
    add(argument.isNone() ? 0 : argument.isTensor() ? 1 : argument.isDouble() ? 2 : 3);
    if (argument.isNone()) return true;
    if (argument.isTensor()) return add_tensor(argument.toTensor());
    if (argument.isDouble()) {
      const double number = argument.toDouble();
      bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
      return true;
    }
    if (!argument.isBool()) return false;
    add(argument.toBool());
    return true;
  }
  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || !is_lazy(w_, tensor)) return false;
    add(tensor.device().type());
    add(tensor.device().index());
    add(tensor.scalar_type());
    add(tensor.requires_grad());
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) add(size);
    for (const int64_t stride : tensor.strides()) add(stride);
    return true;
  }

  const World& w_;
  std::string bytes_;
};

static std::shared_ptr<const Choice> choice_of(const World& w, c10::ArrayRef<IValue> arguments) {
  if (!w.on) return nullptr;
  Gil gil;
  ChoiceKey key(w);
  if (!key.add_all(arguments)) return nullptr;
  const auto found = w.choices.find(key.bytes());
  return found == w.choices.end() ? nullptr : found->second;
}

// `scaled_dot_product_attention`: the kernel that the physical device would choose. False if that
// is for Python to find out.
static bool call_chosen(const World& w, const OperatorHandle& op, Stack* stack) {
  const size_t number = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, number);
  const auto choice = choice_of(w, arguments);
  if (!choice) return false;
  Stack inner;
  inner.reserve(choice->parts.size());
  for (const auto& part : choice->parts) {
    inner.push_back(part.argument ? arguments[*part.argument] : part.constant);
  }
  {
    FirstResult wanted(differentiates(arguments) ? nullptr : &choice->op);
    choice->op.callBoxed(&inner);
  }
  torch::jit::drop(*stack, number);
  stack->push_back(std::move(inner[0]));
  return true;
}

static void choosing_kernel(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const World& w = world();
  if (!call_chosen(w, op, stack)) w.above.at(op).python.callBoxed(op, keys, stack);
}

// The same under the dispatch key `Python`: inference tensors do not meet autograd.
static void choosing_kernel_below(
    const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const World& w = world();
  if (!is_ours_to_record(w) || !call_chosen(w, op, stack)) {
    w.in_python->callBoxed(op, keys, stack);
  }
}

static torch::CppFunction above_kernel_of(const std::string& rule) {
  using torch::CppFunction;
  if (rule == "linear") return CppFunction::makeFromBoxedFunction<&above_kernel<of_linear>>();
  if (rule == "matmul") return CppFunction::makeFromBoxedFunction<&above_kernel<of_matmul>>();
  if (rule == "to") return CppFunction::makeFromBoxedFunction<&above_kernel<of_to>>();
  if (rule == "dropout") return CppFunction::makeFromBoxedFunction<&above_kernel<of_dropout>>();
  TORCH_CHECK(rule == "choice", "no rule ", rule);
  return CppFunction::makeFromBoxedFunction<&choosing_kernel>();
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
  Stack results;
  const auto make_key = [&](Call& call) { return call.key_of_one(tensor); };
  if (look_up(w, *w.detach_op, {}, make_key, false, results)) {
    return THPVariable_Wrap(results[0].toTensor());
  }
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
  find(w.kept_look, "KeptView", "look");
  find(w.kept_storage, "KeptView", "storage");
  find(w.view_base, "View", "base");
  find(w.view_index, "View", "index");
  find(w.view_node, "View", "node");
  find(w.view_parent, "View", "parent");
  find(w.view_type, "View", "type");
  find(w.view_value, "View", "value");
  find(w.node_outputs, "Node", "outputs");
  find(w.node_transient, "Node", "transient");
  find(w.node_op, "Node", "op");
  find(w.node_args, "Node", "args");
  find(w.node_key, "Node", "key");
  find(w.node_operands, "Node", "operands");
  find(w.kind_nodes, "OpKind", "nodes");
  find(w.expansion_outputs, "Expansion", "outputs");
  find(w.value_type, "Value", "type");
  find(w.value_index, "Value", "index");
  find(w.value_node, "Value", "node");
  find(w.type_wrapper, "TensorType", "wrapper");
  find(w.type_conj, "TensorType", "conj");
  find(w.type_neg, "TensorType", "neg");
  find(w.type_concrete, "TensorType", "concrete");
  find(w.type_injective, "TensorType", "injective");
  find(w.data_device, "BackendData", "device");
  find(w.data_type, "BackendData", "type");
  find(w.data_tensor, "BackendData", "tensor");
  find(w.data_error, "BackendData", "error");
  find(w.data_done, "BackendData", "done");
  find(w.data_info, "BackendData", "info");
}

// setup(names): the classes and functions of torpor that are used here.
static PyObject* setup(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  World& w = world();
  w.lazy_tensor = take_type(names, "LazyTensor");
  w.lazy_storage = take_type(names, "LazyStorage");
  w.view = take_type(names, "View");
  w.kept_view = take_type(names, "KeptView");
  w.lazy_mode = take_type(names, "LazyMode");
  w.node = take_type(names, "Node");
  w.expansion = take_type(names, "Expansion");
  w.tensor_type = take_type(names, "TensorType");
  w.symbolic_type = take_type(names, "SymbolicType");
  w.value = take_type(names, "Value");
  w.backend_data = take_type(names, "BackendData");
  find_slots(w, names);
  w.trace = take(names, "trace");
  w.trace_builder.find(reinterpret_cast<PyObject*>(Py_TYPE(w.trace)), "builder");
  w.builder = take_type(names, "IrBuilder");
  w.leaf_op = take(names, "leaf_op");
  w.leaf_nodes = take(names, "leaf_nodes");
  w.leaves = take(names, "leaves");
  w.leaf_storages = take(names, "leaf_storages");
  w.leaf_values = take(names, "leaf_values");
  w.sizes = take(names, "sizes");
  w.scatters = take(names, "scatters");
  w.name_active = PyUnicode_InternFromString("active");
  w.acquire = take(names, "acquire");
  w.release = take(names, "release");
  w.pending = take(names, "pending");
  w.forget = take(names, "forget");
  w.leaf_value = take(names, "leaf_value");
  w.plain_value = take(names, "plain_value");
  w.entered = take(names, "entered");
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
  w.users_of_one = cuts::count_users_of_one();
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

// Give an op a kernel under the dispatch key `Python`.
static void take_over(World& w, const OperatorHandle& handle, torch::CppFunction kernel) {
  const c10::OperatorName& name = handle.operator_name();
  auto& library = w.libraries[std::string(*name.getNamespace())];
  if (!library) {
    library = std::make_unique<torch::Library>(
        torch::Library::IMPL, std::string(*name.getNamespace()), c10::DispatchKey::Python, __FILE__,
        __LINE__);
  }
  library->impl(c10::toString(name).c_str(), std::move(kernel));
}

static size_t take_number(PyObject* tuple, Py_ssize_t place) {
  const size_t number = PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, place));
  if (PyErr_Occurred()) fail();
  return number;
}

// -- signatures: what `ops.signature` derives of an op ---------------------------------------------

static Ref attribute(PyObject* object, const char* name) {
  return checked(PyObject_GetAttrString(object, name));
}

static bool take_flag(PyObject* object, const char* name) {
  return attribute(object, name).get() == Py_True;
}

static size_t take_position(PyObject* object, const char* name) {
  const size_t number = PyLong_AsSize_t(attribute(object, name).get());
  if (PyErr_Occurred()) fail();
  return number;
}

// What becomes of the outputs of an op's nodes: `Signature.results`, then `Signature.written`.
static void take_results(Op& op, PyObject* signature) {
  Ref results = attribute(signature, "results");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results.get()); ++i) {
    PyObject* one = PyTuple_GET_ITEM(results.get(), i);
    const Return made{
        static_cast<Make>(take_position(one, "make")), take_flag(one, "is_list"),
        take_position(one, "argument")};
    const bool is_output = made.make != Make::argument && made.make != Make::length;
    op.alone += is_output && !made.is_list;
    op.has_list = op.has_list || (is_output && made.is_list);
    op.has_fresh = op.has_fresh || made.make == Make::fresh;
    op.returns.push_back(made);
  }
  Ref written = attribute(signature, "written");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(written.get()); ++i) {
    PyObject* one = PyTuple_GET_ITEM(written.get(), i);
    op.written.push_back({take_position(one, "argument"), take_flag(one, "may_repeat")});
  }
  op.assigns = take_flag(signature, "assigns");
  op.is_window = take_flag(signature, "is_window");
  op.bumps = take_flag(signature, "bumps");
}

// What ends an op's keys: `Signature.extra`.
static void take_extra(Op& op, PyObject* signature) {
  Ref extra = attribute(signature, "extra");
  op.grad_mode = take_flag(extra.get(), "grad_mode");
  Ref grads = attribute(extra.get(), "requires_grad");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grads.get()); ++i) {
    op.grads.push_back(take_number(grads.get(), i));
  }
}

// add(name, overload, recording, attributes, recorder, promoted): record calls of an op here, as its
// `Recording` says; False if its arguments are of a kind that is not known here.
static PyObject* add(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject *recording, *attributes, *recorder, *promoted;
  if (!PyArg_ParseTuple(
          arguments, "ssOO!OO", &name, &overload, &recording, &PyDict_Type, &attributes, &recorder,
          &promoted)) {
    return nullptr;
  }
  World& w = world();
  const OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto& schema = handle.schema().arguments();
  auto op = std::make_unique<Op>();
  Ref signature = attribute(recording, "signature");
  Ref letters = attribute(signature.get(), "kinds");
  const char* kinds = PyUnicode_AsUTF8(letters.get());
  if (kinds == nullptr) return nullptr;
  for (size_t i = 0; i < schema.size(); ++i) {
    const Kind kind = kind_of(kinds[i], schema[i]);
    if (has_odd_default(kind, schema[i])) Py_RETURN_FALSE;
    op->kinds.push_back(kind);
  }
  take_results(*op, signature.get());
  take_extra(*op, signature.get());
  op->attributes = Py_NewRef(attributes);
  op->recorder = Py_NewRef(recorder);
  op->nodes = attribute(recording, "nodes").release();
  op->calls = attribute(recording, "calls").release();
  op->promoted = Py_NewRef(promoted);
  const Op* made = op.release();
  const bool is_new = w.ops.count(handle) == 0;
  w.ops[handle] = made;
  if (is_new) take_over(w, handle, torch::CppFunction::makeFromBoxedFunction<&kernel>());
  if (std::string(name) == "aten::detach") w.detach_op = made;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

class Quiet : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

static void implement_above(const OperatorHandle& op, torch::CppFunction kernel) {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradLazy, __FILE__, __LINE__);
  Quiet quiet;  // it is meant to take the place of Python's
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library->impl(c10::toString(op.operator_name()).c_str(), std::move(kernel));
}

// want_first(name, overload, inner_name, inner_overload): calls of an op, which takes the first
// result of the inner one, get no other where there are no gradients.
static PyObject* want_first(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *name, *overload, *inner_name, *inner_overload;
  if (!PyArg_ParseTuple(arguments, "ssss", &name, &overload, &inner_name, &inner_overload)) {
    return nullptr;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  const OperatorHandle op = dispatcher.findSchemaOrThrow(name, overload);
  const OperatorHandle inner = dispatcher.findSchemaOrThrow(inner_name, inner_overload);
  constexpr auto key = c10::DispatchKey::AutogradLazy;
  world().firsts.add(op, FirstOf{op.getComputedKernelForDispatchKey(key), inner});
  implement_above(op, torch::CppFunction::makeFromBoxedFunction<&first_result_kernel>());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// decide_above_autograd(name, overload, rule, kernel): decide here, by a rule, which way a call of an op above
// autograd goes; `kernel` is what the usual case calls, None if the first argument is its result.
// False if that is no kernel that can be read here: a library built by another compiler than torch.
static PyObject* decide_above_autograd(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *name, *overload, *rule;
  PyObject* kernel;
  if (!PyArg_ParseTuple(arguments, "sssO", &name, &overload, &rule, &kernel)) return nullptr;
  const OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  constexpr auto key = c10::DispatchKey::AutogradLazy;
  std::optional<c10::SafeKernelFunction> usual;
  try {
    if (kernel != Py_None) usual = py::handle(kernel).cast<c10::SafeKernelFunction>();
  } catch (const py::cast_error&) {
    Py_RETURN_FALSE;
  }
  world().above.add(
      handle, Above{std::move(usual), handle.getComputedKernelForDispatchKey(key)});
  implement_above(handle, above_kernel_of(rule));
  if (std::string(rule) == "choice") {
    take_over(
        world(), handle, torch::CppFunction::makeFromBoxedFunction<&choosing_kernel_below>());
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

static IValue constant(PyObject* object) {
  if (object == Py_None) return IValue();
  if (PyBool_Check(object)) return IValue(object == Py_True);
  if (PyFloat_Check(object)) return IValue(PyFloat_AS_DOUBLE(object));
  if (THPVariable_Check(object)) return IValue(THPVariable_Unpack(object));
  PyErr_Format(PyExc_TypeError, "%R is no argument of a choice", object);
  fail();
}

// choose(arguments, name, overload, parts): from now on a call of attention with arguments like
// these is a call of the op of that name. Each of its arguments is an integer, the position of one
// of `arguments`, or a constant.
static PyObject* choose(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject *arguments, *parts;
  if (!PyArg_ParseTuple(
          packed, "O!ssO!", &PyTuple_Type, &arguments, &name, &overload, &PyTuple_Type, &parts)) {
    return nullptr;
  }
  World& w = world();
  std::vector<IValue> given;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
    given.push_back(constant(PyTuple_GET_ITEM(arguments, i)));
  }
  ChoiceKey key(w);
  if (!key.add_all(given)) Py_RETURN_FALSE;
  Choice choice{c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), {}};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); ++i) {
    PyObject* part = PyTuple_GET_ITEM(parts, i);
    if (PyLong_CheckExact(part)) {
      choice.parts.push_back({take_number(parts, i), IValue()});
    } else {
      choice.parts.push_back({std::nullopt, constant(part)});
    }
  }
  if (w.choices.size() >= kMaxChoices) w.choices.clear();
  w.choices.insert_or_assign(key.bytes(), std::make_shared<const Choice>(std::move(choice)));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// forget_choices(): tensors may be on other devices than before.
static PyObject* forget_choices(PyObject*, PyObject*) {
  world().choices.clear();
  Py_RETURN_NONE;
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

// made(): results with a storage of their own that were made here.
static PyObject* made(PyObject*, PyObject*) { return PyLong_FromLongLong(world().made); }

static PyMethodDef methods[] = {
    {"setup", setup, METH_O, nullptr},
    {"add", add, METH_VARARGS, nullptr},
    {"want_first", want_first, METH_VARARGS, nullptr},
    {"decide_above_autograd", decide_above_autograd, METH_VARARGS, nullptr},
    {"choose", choose, METH_VARARGS, nullptr},
    {"forget_choices", forget_choices, METH_NOARGS, nullptr},
    {"parts", set_parts, METH_O, nullptr},
    {"switch", set_on, METH_O, nullptr},
    {"made", made, METH_NOARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"live", cuts::live, METH_O, nullptr},
    {"forget", cuts::forget, METH_VARARGS, nullptr},
    {"settle", cuts::settle, METH_VARARGS, nullptr},
    {"handles", cuts::handles, METH_VARARGS, nullptr},
    {"filled", cuts::filled, METH_VARARGS, nullptr},
    {"tensors", cuts::tensors, METH_O, nullptr},
    {"assign", cuts::assign, METH_VARARGS, nullptr},
    {"hold", cuts::hold, METH_VARARGS, nullptr},
    {"replaced", cuts::replaced, METH_VARARGS, nullptr},
    {"shared", cuts::shared, METH_VARARGS, nullptr},
    {"region_values", regions::values, METH_O, nullptr},
    {"autocast_copies", regions::autocast_copies, METH_O, nullptr},
    {"region_storages", region_storages, METH_O, nullptr},
    {"region_results", region_results, METH_VARARGS, nullptr},
    {"versions", regions::versions, METH_O, nullptr},
    {"read_step", optimizers::read_step, METH_VARARGS, nullptr},
    {"write_step", optimizers::write_step, METH_VARARGS, nullptr},
    {"stepped", optimizers::stepped, METH_O, nullptr},
    {"adam", adam::adam, METH_VARARGS, nullptr},
    {"call_modules", modules::call_modules, METH_VARARGS, nullptr},
    {"find_attributes", modules::find_attributes, METH_VARARGS, nullptr},
    {"modules", modules::modules, METH_NOARGS, nullptr},
    {"tape", tape::make_tape, METH_VARARGS, nullptr},
    {"run_tape", tape::run_tape, METH_VARARGS, nullptr},
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatch)),
     METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "torpor_native", "torpor's native recorder.", -1, methods,
    nullptr, nullptr, nullptr, nullptr};

}  // namespace torpor

PyMODINIT_FUNC PyInit_torpor_native() { return PyModule_Create(&torpor::definition); }
