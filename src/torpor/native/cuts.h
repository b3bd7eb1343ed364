// Cuts: the loops over all live tensors at the end of a step. Each does what the Python beside its
// call does (execute/storage.py, execute/sync.py, transactions/donation.py).

#pragma once

#include <ATen/Functions.h>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>

#include "world.h"

namespace torpor::cuts {

inline void expect(PyObject* object, PyTypeObject* type) {
  if (Py_TYPE(object) == type) return;
  PyErr_Format(PyExc_TypeError, "%R is no %s", object, type->tp_name);
  fail();
}

// The storages that are still there, of a dictionary by weak references to them.
inline std::vector<Ref> storages_of(const World& w, PyObject* pending) {
  expect(pending, &PyDict_Type);
  Ref references = checked(PyDict_Keys(pending));  // one that ends meanwhile leaves the dictionary
  std::vector<Ref> storages;
  storages.reserve(PyList_GET_SIZE(references.get()));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(references.get()); ++i) {
    Ref storage = checked(PyObject_CallNoArgs(PyList_GET_ITEM(references.get(), i)));
    if (storage.get() == Py_None) continue;
    expect(storage.get(), w.lazy_storage);
    storages.push_back(std::move(storage));
  }
  return storages;
}

// live(pending): storages somebody still holds whose value is pending.
inline PyObject* live(PyObject*, PyObject* pending) {
  HANDLE_TH_ERRORS
  const World& w = world();
  Ref found = checked(PyList_New(0));
  for (const Ref& storage : storages_of(w, pending)) {
    if (w.storage_data.of(storage.get()) != Py_None) continue;
    if (PyList_Append(found.get(), storage.get()) < 0) fail();
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// forget(pending, leaf_storages): storages forget their values, and that they are listed.
inline PyObject* forget(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *pending, *leaf_storages;
  if (!PyArg_ParseTuple(arguments, "OO!", &pending, &PyList_Type, &leaf_storages)) return nullptr;
  for (const Ref& storage : storages_of(w, pending)) {
    w.storage_value.set(storage.get(), Py_None);
    w.storage_listed.set(storage.get(), Py_False);
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaf_storages); ++i) {
    Ref entry = Ref::to(PyList_GET_ITEM(leaf_storages, i));
    expect(entry.get(), &PyTuple_Type);
    PyObject* storage = PyTuple_GET_ITEM(entry.get(), 0);
    expect(storage, w.lazy_storage);
    w.storage_value.set(storage, Py_None);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// `LazyStorage.hold`.
inline void give(const World& w, PyObject* storage, PyObject* data) {
  w.storage_data.set(storage, data);
  w.storage_type.set(storage, w.type_concrete.of(w.storage_type.of(storage)));
}

// settle(live, wanted, leaves, known): give storages whose value is a leaf or known its data; those
// of the wanted values that are neither, each once.
inline PyObject* settle(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *live, *wanted, *leaves, *known;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!O!", &PyList_Type, &live, &PyList_Type, &wanted, &PyList_Type, &leaves,
          &PyDict_Type, &known)) {
    return nullptr;
  }
  auto data_of = [&](PyObject* value) -> PyObject* {  // borrowed; null: it is to be computed
    expect(value, w.value);
    PyObject* node = w.value_node.of(value);
    if (w.node_op.of(node) == w.leaf_op) {
      PyObject* place = PyTuple_GetItem(w.node_args.of(node), 0);
      PyObject* data = place == nullptr ? nullptr : PyList_GetItem(leaves, PyLong_AsSsize_t(place));
      if (data == nullptr) fail();
      return data;
    }
    PyObject* data = PyDict_GET_SIZE(known) == 0 ? nullptr : PyDict_GetItemWithError(known, value);
    if (data == nullptr && PyErr_Occurred()) fail();
    return data;
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(live); ++i) {
    PyObject* storage = PyList_GET_ITEM(live, i);
    expect(storage, w.lazy_storage);
    PyObject* data = data_of(w.storage_value.of(storage));
    if (data != nullptr) give(w, storage, data);
  }
  Ref rest = checked(PyDict_New());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wanted); ++i) {
    PyObject* value = PyList_GET_ITEM(wanted, i);
    if (data_of(value) != nullptr) continue;
    if (PyDict_SetItem(rest.get(), value, Py_None) < 0) fail();
  }
  return PySequence_Tuple(rest.get());
  END_HANDLE_TH_ERRORS
}

inline void make_handles(
    const World& w, PyObject* made, PyObject* device, PyObject* types, PyObject* tensors,
    PyObject* done) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    PyObject* data = checked(w.backend_data->tp_alloc(w.backend_data, 0)).release();
    PyList_SET_ITEM(made, i, data);
    w.data_device.set(data, device);
    w.data_type.set(data, PyTuple_GET_ITEM(types, i));
    w.data_tensor.set(data, tensors == nullptr ? Py_None : PyList_GET_ITEM(tensors, i));
    w.data_error.set(data, Py_None);
    w.data_done.set(data, done);
    w.data_info.set(data, Py_None);
  }
}

// handles(device, types, done): a handle for data of each type, which exist when that is done.
inline PyObject* handles(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *device, *types, *done;
  if (!PyArg_ParseTuple(arguments, "OO!O", &device, &PyTuple_Type, &types, &done)) return nullptr;
  Ref made = checked(PyList_New(PyTuple_GET_SIZE(types)));
  make_handles(world(), made.get(), device, types, nullptr, done);
  return made.release();
  END_HANDLE_TH_ERRORS
}

// filled(device, types, tensors): a handle for each tensor.
inline PyObject* filled(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *device, *types, *tensors;
  if (!PyArg_ParseTuple(
          arguments, "OO!O!", &device, &PyTuple_Type, &types, &PyList_Type, &tensors)) {
    return nullptr;
  }
  if (PyList_GET_SIZE(tensors) != PyTuple_GET_SIZE(types)) {
    PyErr_SetString(PyExc_ValueError, "there are not as many tensors as types");
    return nullptr;
  }
  Ref made = checked(PyList_New(PyTuple_GET_SIZE(types)));
  make_handles(world(), made.get(), device, types, tensors, Py_None);
  return made.release();
  END_HANDLE_TH_ERRORS
}

// An attribute of a handle. Classes of backends may have properties in the place of slots.
inline Ref attribute(const World& w, const Slot& slot, PyObject* data, const char* name) {
  PyObject* found = Py_TYPE(data) == w.backend_data ? slot.of(data) : nullptr;
  return found == nullptr ? checked(PyObject_GetAttrString(data, name)) : Ref::to(found);
}

// tensors(arguments): what handles hold, and all else as it is; None if a handle has failed.
inline PyObject* tensors(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  expect(arguments, &PyList_Type);
  Ref found = checked(PyList_New(PyList_GET_SIZE(arguments)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments); ++i) {
    PyObject* argument = PyList_GET_ITEM(arguments, i);
    Ref held = Ref::to(argument);
    if (PyObject_TypeCheck(argument, w.backend_data)) {
      if (attribute(w, w.data_error, argument, "error").get() != Py_None) Py_RETURN_NONE;
      held = attribute(w, w.data_tensor, argument, "tensor");
    }
    PyList_SET_ITEM(found.get(), i, held.release());
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// assign(handles, results): handles take over what others hold; whether one of those has failed.
inline PyObject* assign(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *handles, *results;
  if (!PyArg_ParseTuple(arguments, "O!O", &PyList_Type, &handles, &results)) return nullptr;
  if (!PyList_Check(results)) expect(results, &PyTuple_Type);
  if (PyList_GET_SIZE(handles) != PySequence_Fast_GET_SIZE(results)) {
    PyErr_SetString(PyExc_ValueError, "there are not as many results as handles");
    return nullptr;
  }
  bool failed = false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    PyObject* handle = PyList_GET_ITEM(handles, i);
    PyObject* result = PySequence_Fast_GET_ITEM(results, i);
    if (!PyObject_TypeCheck(result, w.backend_data)) expect(result, w.backend_data);
    Ref error = attribute(w, w.data_error, result, "error");
    if (Py_TYPE(handle) == w.backend_data) {
      w.data_tensor.set(handle, attribute(w, w.data_tensor, result, "tensor").get());
      w.data_error.set(handle, error.get());
    } else {  // a backend's own class
      checked(PyObject_CallMethod(handle, "assign", "O", result));
    }
    failed |= error.get() != Py_None;
  }
  return PyBool_FromLong(failed);
  END_HANDLE_TH_ERRORS
}

// What a dictionary has under a key, borrowed; null: nothing.
inline PyObject* found_in(PyObject* dictionary, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dictionary, key);
  if (found == nullptr && PyErr_Occurred()) fail();
  return found;
}

// hold(live, positions, handles): give each pending storage the handle at the position of its value.
inline PyObject* hold(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *live, *positions, *handles;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!", &PyList_Type, &live, &PyDict_Type, &positions, &PyList_Type,
          &handles)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(live); ++i) {
    PyObject* storage = PyList_GET_ITEM(live, i);
    expect(storage, w.lazy_storage);
    if (w.storage_data.of(storage) != Py_None) continue;
    PyObject* position = found_in(positions, w.storage_value.of(storage));
    if (position == nullptr) continue;
    PyObject* handle = PyList_GetItem(handles, PyLong_AsSsize_t(position));
    if (handle == nullptr) fail();
    give(w, storage, handle);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// replaced(leaf_storages, positions, places, handles, leaves): for each storage that has entered and
// is pending, the handle at the position of its value, what it held (the place of an argument, or
// data), and its entry.
inline PyObject* replaced(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *leaf_storages, *positions, *places, *handles, *leaves;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!O!O!", &PyList_Type, &leaf_storages, &PyDict_Type, &positions,
          &PyDict_Type, &places, &PyList_Type, &handles, &PyList_Type, &leaves)) {
    return nullptr;
  }
  Ref found = checked(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaf_storages); ++i) {
    Ref entry = Ref::to(PyList_GET_ITEM(leaf_storages, i));
    expect(entry.get(), &PyTuple_Type);
    PyObject* storage = PyTuple_GET_ITEM(entry.get(), 0);
    PyObject* leaf = PyTuple_GET_ITEM(entry.get(), 1);
    expect(storage, w.lazy_storage);
    PyObject* value = w.storage_value.of(storage);
    if (value == leaf || w.storage_data.of(storage) != Py_None) continue;
    PyObject* position = found_in(positions, value);
    if (position == nullptr) continue;
    PyObject* handle = PyList_GetItem(handles, PyLong_AsSsize_t(position));
    if (handle == nullptr) fail();
    PyObject* old = found_in(places, leaf);
    if (old == nullptr) {
      expect(leaf, w.value);
      PyObject* slot = PyTuple_GetItem(w.node_args.of(w.value_node.of(leaf)), 0);
      old = slot == nullptr ? nullptr : PyList_GetItem(leaves, PyLong_AsSsize_t(slot));
      if (old == nullptr) fail();
    }
    Ref one = checked(PyTuple_Pack(3, handle, old, entry.get()));
    if (PyList_Append(found.get(), one.get()) < 0) fail();
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// How many users a memory has that one tensor is on, once there was a Python object for it: torch
// may keep that, and it counts.
inline size_t count_users_of_one() {
  at::Tensor tensor = at::empty({1}, at::device(at::kCPU));
  Ref object = checked(THPVariable_Wrap(tensor));
  checked(PyObject_CallMethod(object.get(), "untyped_storage", nullptr));
  return tensor.storage().use_count();
}

// One tensor is on a memory, and no other tensor, array or storage object.
inline bool is_of_one(const World& w, const c10::Storage& memory) {
  PyObject* object = memory.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  if (object == nullptr) return memory.use_count() == 1;
  return memory.use_count() <= w.users_of_one && Py_REFCNT(object) == 1;
}

// Nobody but `data` and who holds that is on the memory of `data`.
inline bool is_sole(const World& w, PyObject* data) {
  PyObject* tensor = w.data_tensor.of(data);
  if (Py_REFCNT(data) > 1) return false;
  if (tensor == nullptr || tensor == Py_None) return true;
  return Py_REFCNT(tensor) == 1 && THPVariable_Check(tensor) &&
      is_of_one(w, THPVariable_Unpack(tensor).storage());
}

// shared(arguments, positions): those positions whose data somebody else holds or looks at.
inline PyObject* shared(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const World& w = world();
  PyObject *arguments, *positions;
  if (!PyArg_ParseTuple(given, "O!O!", &PyList_Type, &arguments, &PyTuple_Type, &positions)) {
    return nullptr;
  }
  Ref found = checked(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); ++i) {
    PyObject* position = PyTuple_GET_ITEM(positions, i);
    PyObject* data = PyList_GetItem(arguments, PyLong_AsSsize_t(position));
    if (data == nullptr) fail();
    if (!PyObject_TypeCheck(data, w.backend_data)) expect(data, w.backend_data);
    if (w.data_error.of(data) != Py_None || is_sole(w, data)) continue;
    if (PyList_Append(found.get(), position) < 0) fail();
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace torpor::cuts
