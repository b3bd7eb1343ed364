// Python objects from C++: references, the GIL, errors, and `__slots__`.

#pragma once

#include <Python.h>
#include <structmember.h>

#include <utility>

#ifdef Py_GIL_DISABLED
#error "everything here is written for the GIL"
#endif

#include <torch/csrc/Exceptions.h>

namespace torpor {

// A reference that is given back by itself.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = std::exchange(object_, other.release());
    Py_XDECREF(old);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  static Ref to(PyObject* borrowed) { return Ref(Py_NewRef(borrowed)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Autograd's threads come without the GIL.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Python has run out of memory, or what was told to `setup` is wrong: there is no way on.
[[noreturn]] inline void fail() {
  python_error error;
  error.persist();
  throw error;
}

inline Ref checked(PyObject* made) {
  if (made == nullptr) fail();
  return Ref(made);
}

// One of the `__slots__` of a class.
class Slot {
 public:
  void find(PyObject* type, const char* name) {
    Ref member = checked(PyObject_GetAttrString(type, name));
    if (Py_TYPE(member.get()) != &PyMemberDescr_Type) {
      PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
      fail();
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
  }
  PyObject* of(PyObject* object) const { return *place(object); }  // borrowed; null: not set
  void set(PyObject* object, PyObject* value) const {
    PyObject* old = std::exchange(*place(object), Py_NewRef(value));
    Py_XDECREF(old);
  }

 private:
  PyObject** place(PyObject* object) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

}  // namespace torpor
