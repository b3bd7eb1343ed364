// What the native recorder knows: the classes of torpor, its trace, the ops it records.

#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "objects.h"

namespace torpor {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// How wrappers of one type are made; learnt from one that torch has made.
struct Wrapper {
  c10::DimVector sizes;
  c10::DimVector strides;
  bool contiguous;
  int64_t offset;
  size_t nbytes;
  caffe2::TypeMeta dtype;
  c10::Device device;
  c10::DispatchKeySet keys;
};

// What a recorder makes of an output of the node it found: the kinds of `ops.signature.Make`.
enum class Make { fresh, view, alias, argument, length };

// One result of an op; a list takes all outputs that nothing else takes.
struct Return {
  Make make;
  bool is_list;
  size_t argument;  // that is viewed, is the result itself, or has a length that is
};

// An argument that is written to.
struct Written {
  size_t argument;
  bool may_repeat;  // it may be another argument too: not `out=`, not where indices say
};

// How an argument enters a key: the kinds of `ops.spec.ArgKind`, and plain ones that are named.
enum class Kind {
  tensor, tensors, plain, plains, number, numbers, opaque,
  dtype, layout, memory_format, device,
};

// One op and its Python recorder.
struct Op {
  std::vector<Kind> kinds;
  std::vector<Return> returns;
  std::vector<Written> written;  // their values are the node's last outputs
  Py_ssize_t alone = 0;  // outputs that become a result each
  bool has_list = false;
  bool has_fresh = false;
  bool assigns = false;  // as in the signature ...
  bool is_window = false;  // ... this too
  bool bumps = false;  // ... and this
  bool grad_mode;  // the key ends with the grad mode ...
  std::vector<size_t> grads;  // ... and with whether these arguments require a gradient
  PyObject* attributes;  // of the torch op: its Python recorder is among them
  PyObject* recorder;
  PyObject* nodes;
  PyObject* calls;  // where they are counted
  PyObject* promoted;  // finds nodes by keys whose numbers are run-time inputs, or None
};

// An op that has a Python kernel above autograd, which has little to do in the usual case.
struct Above {
  std::optional<c10::SafeKernelFunction> usual;  // none: the first argument is the result
  c10::SafeKernelFunction python;  // what knows all cases
};

// An op that is the first result of another one.
struct FirstOf {
  c10::SafeKernelFunction composite;
  OperatorHandle inner;
};

// What a call of an op above autograd comes to: a call of another op, whose first result it is.
struct Choice {
  struct Part {
    std::optional<size_t> argument;  // of the call; none: a constant
    IValue constant;
  };
  OperatorHandle op;
  std::vector<Part> parts;
};

struct Numbers {  // keys of numbers that Python would confuse with others
  PyObject *zero, *negative_zero, *nan, *int_, *bool_;
};

// What is known of ops: added to under the GIL, read without it. A reader may still have an old map,
// so those are kept.
template <class Known>
class OfOps {
 public:
  const Known& at(const OperatorHandle& op) const { return *maps_.load()->at(op); }
  void add(const OperatorHandle& op, Known known) {
    auto* grown = new Map(*maps_.load());
    grown->insert_or_assign(op, std::make_shared<const Known>(std::move(known)));
    maps_.store(grown);
  }

 private:
  using Map = std::unordered_map<OperatorHandle, std::shared_ptr<const Known>>;
  std::atomic<const Map*> maps_{new Map};
};

struct World {
  std::atomic<bool> on{false};
  PyTypeObject *lazy_tensor, *lazy_storage, *view, *lazy_mode, *node, *expansion, *value,
      *kept_view;
  PyTypeObject *tensor_type, *symbolic_type, *backend_data;
  Slot storage_type, storage_value, storage_data, storage_listed;
  Slot kept_look, kept_storage;
  Slot view_base, view_index, view_node, view_parent, view_type, view_value;
  Slot node_outputs, node_transient, node_op, node_args, node_key, node_operands, kind_nodes;
  Slot expansion_outputs;
  Slot value_type, value_index, value_node;
  Slot type_wrapper, type_conj, type_neg, type_concrete, type_injective;
  Slot data_device, data_type, data_tensor, data_error, data_done, data_info;
  PyObject *name_storage, *name_view, *name_recorder, *name_limit;
  PyObject *trace, *leaf_op, *leaf_nodes, *leaves, *leaf_storages, *leaf_values, *sizes, *name_active;
  PyObject* scatters;
  PyTypeObject* builder;
  Slot trace_builder;
  PyObject *acquire, *release, *pending, *forget, *config, *make_wrapper, *dispatch;
  PyObject *leaf_value, *plain_value, *entered;
  PyObject* detach;  // the torch op ...
  const Op* detach_op = nullptr;  // ... and what is known of it
  Numbers numbers;
  std::unordered_map<OperatorHandle, const Op*> ops;  // one that was replaced may be in use
  OfOps<Above> above;
  OfOps<FirstOf> firsts;
  std::unordered_map<std::string, std::shared_ptr<const Choice>> choices;  // under the GIL
  std::atomic<bool> parts{false};  // composite ops are taken apart, all of them
  std::unordered_map<PyObject*, Wrapper> wrappers;  // by `TensorType.wrapper`, which is kept alive
  std::optional<c10::SafeKernelFunction> in_python;  // torch's kernel for all ops
  std::unordered_map<std::string, std::unique_ptr<torch::Library>> libraries;  // by namespace
  size_t users_of_one = 1;  // of the memory of one tensor, once there was a Python object for it
  int64_t recorded = 0, passed_on = 0;  // calls
  int64_t made = 0;  // results
};

inline World& world() {
  static World* the_world = new World();  // lives as long as the process
  return *the_world;
}

constexpr size_t kMaxWrappers = 8192;
constexpr size_t kMaxChoices = 1024;

// The trace's lock, for one call.
class Lock {
 public:
  explicit Lock(const World& w) : w_(w) {
    checked(PyObject_CallNoArgs(w.acquire));
    collects_ = PyGC_Disable() == 1;
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    if (collects_) PyGC_Enable();
    Py_XDECREF(PyObject_CallNoArgs(w_.release));
  }

 private:
  const World& w_;
  bool collects_;  // garbage; not meanwhile: finalizers may record, and what is read here is borrowed
};

// Let the trace know a storage that it may have to compute.
inline void enlist(const World& w, PyObject* storage) {
  Ref reference = checked(PyWeakref_NewRef(storage, w.forget));
  if (PyDict_SetItem(w.pending, reference.get(), Py_None) < 0) fail();
  w.storage_listed.set(storage, Py_True);
}

inline void write(const World& w, PyObject* storage, PyObject* value) {
  if (w.storage_listed.of(storage) != Py_True) enlist(w, storage);
  w.storage_data.set(storage, Py_None);
  w.storage_value.set(storage, value);
}

}  // namespace torpor
