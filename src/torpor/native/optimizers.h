// Steps of optimizers: the loops over parameters, their gradients and what is kept for them. Each
// does what the Python beside its call does (capture/optimizer_steps.py, frontend/optimizers.py).

#pragma once

#include <algorithm>
#include <vector>

#include "regions.h"

namespace torpor::optimizers {

// The gradient of a parameter, borrowed; null if it has none, or if Python has to look at it.
struct Gradient {
  bool is_there;
  PyObject* tensor;
};

inline Gradient gradient_of(const World& w, PyObject* parameter) {
  const at::Tensor& found = THPVariable_Unpack(parameter).unsafeGetTensorImpl()->grad();
  if (!found.defined()) return {false, nullptr};
  PyObject* object = found.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return {true, object != nullptr && Py_TYPE(object) == w.lazy_tensor ? object : nullptr};
}

// The parameters of a group; null if Python has to look at it.
inline Ref parameters_of(PyObject* group) {
  PyObject* found = PyDict_CheckExact(group) ? PyDict_GetItemString(group, "params") : nullptr;
  return found != nullptr && PyList_CheckExact(found) ? Ref::to(found) : Ref();
}

inline bool is_counter(PyObject* name, PyObject* kept) {
  return reinterpret_cast<PyObject*>(Py_TYPE(kept)) == THPVariableClass &&
      PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "step") == 0;
}

// What a step reads, of all groups. Its functions are false if Python has to look.
class Reader {
 public:
  Reader(const World& w, PyObject* state) : w_(w), state_(state) {}

  bool read_group(PyObject* group);
  bool is_apart();  // what is written shares its memory with nothing else
  bool read_values();
  PyObject* found();

 private:
  struct Group {
    Ref names;  // of what is kept for each parameter
    Ref counters = checked(PyList_New(0));
    std::vector<double> counts;
    std::optional<at::ScalarType> dtype;
    Py_ssize_t number = 0;
  };

  PyObject* kept_for(PyObject* parameter);
  bool read_kept(Group& group, PyObject* kept);
  bool count(Group& group, PyObject* counter);
  bool has_dtype(Group& group, PyObject* tensor);
  bool add_whole(Group& group, PyObject* tensor);
  static void append(const Ref& list, PyObject* item) {
    if (PyList_Append(list.get(), item) < 0) fail();
  }

  const World& w_;
  PyObject* state_;
  Py_ssize_t next_ = 0;  // what is kept stands in the order of parameters, as a rule
  Ref tensors_ = checked(PyList_New(0)), storages_ = checked(PyList_New(0));
  Ref gradients_ = checked(PyList_New(0)), counters_ = checked(PyList_New(0));
  Ref counts_ = checked(PyList_New(0)), shapes_ = checked(PyList_New(0)), values_;
};

// Borrowed; null: nothing. A look-up by a tensor's hash, which is a Python function, is slow.
inline PyObject* Reader::kept_for(PyObject* parameter) {
  PyObject *key, *kept;
  Py_ssize_t next = next_;
  if (PyDict_Next(state_, &next, &key, &kept) && key == parameter) {
    next_ = next;
    return kept;
  }
  kept = PyDict_GetItemWithError(state_, parameter);
  if (kept == nullptr && PyErr_Occurred()) fail();
  return kept;
}

inline bool Reader::has_dtype(Group& group, PyObject* tensor) {
  const auto dtype = THPVariable_Unpack(tensor).scalar_type();
  if (!group.dtype) group.dtype = dtype;
  return *group.dtype == dtype;
}

inline bool Reader::add_whole(Group& group, PyObject* tensor) {
  if (Py_TYPE(tensor) != w_.lazy_tensor || !has_dtype(group, tensor)) return false;
  Ref storage = checked(PyObject_GetAttr(tensor, w_.name_storage));
  Ref view = checked(PyObject_GetAttr(tensor, w_.name_view));
  if (Py_TYPE(storage.get()) != w_.lazy_storage || view.get() != Py_None) return false;
  append(tensors_, tensor);
  append(storages_, storage.get());
  return true;
}

inline bool Reader::count(Group& group, PyObject* counter) {
  const at::Tensor& tensor = THPVariable_Unpack(counter);
  const auto dtype = tensor.scalar_type();
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.numel() != 1 ||
      tensor.requires_grad() || (dtype != at::kFloat && dtype != at::kDouble)) {
    return false;
  }
  const double made = dtype == at::kFloat ? *tensor.const_data_ptr<float>()
                                          : *tensor.const_data_ptr<double>();
  auto& known = group.counts;
  if (std::find(known.begin(), known.end(), made) == known.end()) known.push_back(made);
  append(group.counters, counter);
  return true;
}

inline bool Reader::read_kept(Group& group, PyObject* kept) {
  Ref names = checked(PyList_New(0));
  PyObject *name, *one;
  Py_ssize_t next = 0;
  while (kept != nullptr && PyDict_Next(kept, &next, &name, &one)) {
    if (one == Py_None) continue;
    append(names, name);
    if (!(is_counter(name, one) ? count(group, one) : add_whole(group, one))) return false;
  }
  if (!group.names) {
    group.names = std::move(names);
    return true;
  }
  const int same = PyObject_RichCompareBool(group.names.get(), names.get(), Py_EQ);
  if (same < 0) fail();
  return same == 1;
}

inline bool Reader::read_group(PyObject* described) {
  Ref parameters = parameters_of(described);
  if (!parameters) return false;
  Group group;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters.get()); ++i) {
    PyObject* parameter = PyList_GET_ITEM(parameters.get(), i);
    if (Py_TYPE(parameter) != w_.lazy_tensor) return false;
    const Gradient gradient = gradient_of(w_, parameter);
    if (!gradient.is_there) continue;
    if (gradient.tensor == nullptr || !add_whole(group, parameter) ||
        !has_dtype(group, gradient.tensor)) {
      return false;
    }
    append(gradients_, gradient.tensor);
    PyObject* kept = kept_for(parameter);
    if ((kept != nullptr && !PyDict_CheckExact(kept)) || !read_kept(group, kept)) return false;
    ++group.number;
  }
  Ref counts = checked(PyList_New(0));
  for (const double made : group.counts) append(counts, checked(PyFloat_FromDouble(made)).get());
  append(counts_, counts.get());
  append(counters_, group.counters.get());
  Ref names = group.names ? checked(PyList_AsTuple(group.names.get())) : Ref::to(Py_None);
  PyObject* dtype =
      group.dtype ? reinterpret_cast<PyObject*>(torch::getTHPDtype(*group.dtype)) : nullptr;
  Ref shape = checked(
      dtype == nullptr ? Py_BuildValue("(nO)", group.number, names.get())
                       : Py_BuildValue("(nOO)", group.number, names.get(), dtype));
  append(shapes_, shape.get());
  return true;
}

inline bool Reader::is_apart() {
  std::vector<PyObject*> written;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(storages_.get()); ++i) {
    written.push_back(PyList_GET_ITEM(storages_.get(), i));
  }
  std::sort(written.begin(), written.end());
  if (std::adjacent_find(written.begin(), written.end()) != written.end()) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(gradients_.get()); ++i) {
    Ref storage = checked(PyObject_GetAttr(PyList_GET_ITEM(gradients_.get(), i), w_.name_storage));
    if (std::binary_search(written.begin(), written.end(), storage.get())) return false;
  }
  return true;
}

inline bool Reader::read_values() {
  const Py_ssize_t written = PyList_GET_SIZE(storages_.get());
  const Py_ssize_t all = written + PyList_GET_SIZE(gradients_.get());
  values_ = checked(PyTuple_New(all));
  for (Py_ssize_t i = 0; i < all; ++i) {
    Ref value = i < written
        ? regions::root_value(w_, PyList_GET_ITEM(storages_.get(), i))
        : regions::value_of(w_, PyList_GET_ITEM(gradients_.get(), i - written));
    if (!value && PyErr_Occurred()) fail();
    if (!value) return false;
    PyTuple_SET_ITEM(values_.get(), i, value.release());
  }
  return true;
}

inline PyObject* Reader::found() {
  return PyTuple_Pack(
      7, tensors_.get(), gradients_.get(), counters_.get(), shapes_.get(), counts_.get(),
      values_.get(), storages_.get());
}

// read_step(groups, state): tensors that a step may write to, gradients, counters of steps; of each
// group, how many parameters have a gradient, what is kept for them, their dtype, and how many
// steps they have made; values; storages of the tensors. None if Python has to look.
inline PyObject* read_step(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *groups, *state;
  if (!PyArg_ParseTuple(arguments, "OO", &groups, &state)) return nullptr;
  if (!PyList_CheckExact(groups) || !PyDict_Check(state)) Py_RETURN_NONE;
  Reader reader(world(), state);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); ++i) {
    if (!reader.read_group(PyList_GET_ITEM(groups, i))) Py_RETURN_NONE;
  }
  if (!reader.is_apart() || !reader.read_values()) Py_RETURN_NONE;
  return reader.found();
  END_HANDLE_TH_ERRORS
}

inline PyObject* item(PyObject* list, PyObject* place) {
  PyObject* found = PyList_GetItem(list, PyLong_AsSsize_t(place));
  if (found == nullptr) fail();
  return found;
}

inline void add_one(PyObject* counter) {
  const at::Tensor& tensor = THPVariable_Unpack(counter);
  if (tensor.scalar_type() == at::kFloat) {
    *tensor.mutable_data_ptr<float>() += 1.0F;
  } else {
    *tensor.mutable_data_ptr<double>() += 1.0;
  }
  tensor.unsafeGetTensorImpl()->bump_version();
}

// write_step(tensors, storages, written, versions, counters): what `read_step` has found is written
// to: values by place, new versions by place, again and again, and counters count one step more.
inline PyObject* write_step(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *tensors, *storages, *written, *versions, *counters;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!O!O!", &PyList_Type, &tensors, &PyList_Type, &storages, &PyList_Type,
          &written, &PyList_Type, &versions, &PyList_Type, &counters)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(written); ++i) {
    PyObject* one = PyList_GET_ITEM(written, i);
    cuts::expect(one, &PyTuple_Type);
    write(w, item(storages, PyTuple_GET_ITEM(one, 0)), PyTuple_GET_ITEM(one, 1));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(versions); ++i) {
    PyObject* places = PyList_GET_ITEM(versions, i);
    cuts::expect(places, &PyList_Type);
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(places); ++j) {
      PyObject* tensor = item(tensors, PyList_GET_ITEM(places, j));
      THPVariable_Unpack(tensor).unsafeGetTensorImpl()->bump_version();
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(counters); ++i) {
    PyObject* of_group = PyList_GET_ITEM(counters, i);
    cuts::expect(of_group, &PyList_Type);
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(of_group); ++j) {
      add_one(PyList_GET_ITEM(of_group, j));
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// stepped(groups): parameters that have a gradient, and what the storages of those hold. None if
// Python has to look.
inline PyObject* stepped(PyObject*, PyObject* groups) {
  HANDLE_TH_ERRORS
  const World& w = world();
  if (!PyList_CheckExact(groups)) Py_RETURN_NONE;
  Ref found = checked(PyList_New(0)), values = checked(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); ++i) {
    Ref parameters = parameters_of(PyList_GET_ITEM(groups, i));
    if (!parameters) Py_RETURN_NONE;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(parameters.get()); ++j) {
      PyObject* parameter = PyList_GET_ITEM(parameters.get(), j);
      if (Py_TYPE(parameter) != w.lazy_tensor) Py_RETURN_NONE;
      const Gradient gradient = gradient_of(w, parameter);
      if (!gradient.is_there) continue;
      if (gradient.tensor == nullptr) Py_RETURN_NONE;
      Ref storage = checked(PyObject_GetAttr(gradient.tensor, w.name_storage));
      if (Py_TYPE(storage.get()) != w.lazy_storage) Py_RETURN_NONE;
      if (PyList_Append(found.get(), parameter) < 0 ||
          PyList_Append(values.get(), w.storage_value.of(storage.get())) < 0) {
        fail();
      }
    }
  }
  return PyTuple_Pack(2, found.get(), values.get());
  END_HANDLE_TH_ERRORS
}

}  // namespace torpor::optimizers
