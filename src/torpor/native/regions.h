// Regions: the loops over all that a captured graph reads and gives. Each does what the Python
// beside its call does (capture/region.py).

#pragma once

#include <ATen/autocast_mode.h>

#include "cuts.h"
#include "keys.h"

namespace torpor::regions {

// The value of a storage in this trace; null, with no error set, if Python has to look at it.
inline Ref root_value(const World& w, PyObject* storage) {
  PyObject* value = w.storage_value.of(storage);
  if (value == nullptr) return Ref();
  if (value != Py_None) return Ref::to(value);
  Ref leaf = known_leaf(w, storage);
  if (leaf || PyErr_Occurred()) return leaf;
  return Ref(PyObject_CallOneArg(w.leaf_value, storage));
}

constexpr Py_ssize_t kLookStorage = 0, kLookLinks = 1, kLookRoot = 2, kLookValue = 3;

inline Ref value_of(const World& w, PyObject* item) {
  if (item == Py_None) return Ref::to(Py_None);
  if (Py_TYPE(item) == w.lazy_storage) return root_value(w, item);
  if (Py_TYPE(item) == w.kept_view) {
    PyObject* look = w.kept_look.of(item);
    Ref root = root_value(w, w.kept_storage.of(item));
    if (!root || root.get() != PyTuple_GET_ITEM(look, kLookRoot)) return Ref();
    return Ref::to(PyTuple_GET_ITEM(look, kLookValue));
  }
  if (Py_TYPE(item) != w.lazy_tensor) return Ref();
  Ref storage = checked(PyObject_GetAttr(item, w.name_storage));
  Ref view = checked(PyObject_GetAttr(item, w.name_view));
  if (Py_TYPE(storage.get()) != w.lazy_storage) return Ref();
  Ref root = root_value(w, storage.get());
  if (!root || view.get() == Py_None) return root;
  if (Py_TYPE(view.get()) != w.view || w.view_base.of(view.get()) != root.get()) return Ref();
  return Ref::to(w.view_value.of(view.get()));
}

// region_values(args): the values of tensors and storages; None if Python has to look at one.
inline PyObject* values(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const World& w = world();
  cuts::expect(args, &PyList_Type);
  Ref found = checked(PyTuple_New(PyList_GET_SIZE(args)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args); ++i) {
    Ref value = value_of(w, PyList_GET_ITEM(args, i));
    if (!value) {
      if (PyErr_Occurred()) fail();
      Py_RETURN_NONE;
    }
    PyTuple_SET_ITEM(found.get(), i, value.release());
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// versions(items): those of the tensors among them.
inline PyObject* versions(PyObject*, PyObject* items) {
  HANDLE_TH_ERRORS
  cuts::expect(items, &PyList_Type);
  Ref found = checked(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); ++i) {
    PyObject* item = PyList_GET_ITEM(items, i);
    if (!THPVariable_Check(item)) continue;
    Ref version = checked(PyLong_FromLongLong(THPVariable_Unpack(item)._version()));
    if (PyList_Append(found.get(), version.get()) < 0) fail();
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// autocast_copies(tensors): the copies that autocast keeps of parameters, made now where there are
// none. None: it keeps no copy of one of them.
inline PyObject* autocast_copies(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  cuts::expect(tensors, &PyList_Type);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    if (!tensor.is_leaf() || !tensor.requires_grad() || tensor.is_view()) Py_RETURN_NONE;
  }
  Ref found = checked(PyList_New(PyList_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    const auto device = tensor.device().type();
    c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto lower = at::autocast::get_autocast_dtype(device);
    PyList_SET_ITEM(found.get(), i,
                    checked(THPVariable_Wrap(at::autocast::cached_cast(lower, tensor, device))).release());
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace torpor::regions
