// Modules: `nn.Module.__call__` and `__getattr__` stay the Python functions that they are, with their
// code for whoever traces or inspects it; calls of them come here first. Most module calls are inside
// other ones, of modules without hooks: they come to a call of `forward`
// (`_torch.wrap_outermost_call`). Most attributes are parameters and modules that are there. Whatever
// else there is to do, the function does.

#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include <torch/csrc/jit/frontend/tracer.h>

#include "objects.h"

namespace torpor::modules {

constexpr int kHooks = 4;
constexpr int kTables = 3;

struct Function {
  vectorcallfunc in_python = nullptr;  // null: nobody comes here
  PyObject* calls;  // its `inside` says whether a call is inside another one
  PyObject* implementation;  // `nn.Module._call_impl`
  PyObject* getattribute;  // that of every object
  PyObject* globals;  // of torch's module: it has the hooks of all modules
  PyObject* global_names[kHooks];
  PyObject* hook_names[kHooks];  // of one module
  PyObject *name_inside, *name_implementation, *name_compiled, *name_forward, *name_getattribute;
};

inline Function& the_function() {
  static Function* function = new Function();  // lives as long as the process
  return *function;
}

inline std::vector<PyObject*>& being_called() {  // on this thread, the innermost last
  static thread_local std::vector<PyObject*> modules;
  return modules;
}

class Entered {
 public:
  explicit Entered(PyObject* module) : module_(module) { being_called().push_back(module); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {  // nearly always it is the last; greenlets end calls in any order
    auto& modules = being_called();
    const auto last = std::find(modules.rbegin(), modules.rend(), module_);
    if (last != modules.rend()) modules.erase(std::next(last).base());
  }

 private:
  PyObject* module_;
};

// A profiler or a debugger sees the frames of this thread: it may look for those of modules.
inline bool is_watched() {
  const PyThreadState* thread = PyThreadState_Get();
  return thread->c_profilefunc != nullptr || thread->c_tracefunc != nullptr;
}

inline bool is_inside(const Function& f) {
  Ref inside(PyObject_GetAttr(f.calls, f.name_inside));
  return inside.get() == Py_True;
}

inline bool is_empty(PyObject* hooks) {
  return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0;
}

// Nothing but `forward` is called for a call of it.
inline bool is_plain(const Function& f, PyObject* module, PyObject* attributes) {
  PyTypeObject* type = Py_TYPE(module);
  if (_PyType_Lookup(type, f.name_getattribute) != f.getattribute ||
      _PyType_Lookup(type, f.name_implementation) != f.implementation ||
      PyDict_GetItemWithError(attributes, f.name_implementation) != nullptr) {
    return false;
  }
  PyObject* compiled = PyDict_GetItemWithError(attributes, f.name_compiled);
  if (compiled == nullptr) compiled = _PyType_Lookup(type, f.name_compiled);
  if (compiled != Py_None) return false;
  for (int i = 0; i < kHooks; ++i) {
    if (!is_empty(PyDict_GetItemWithError(f.globals, f.global_names[i]))) return false;
    if (!is_empty(PyDict_GetItemWithError(attributes, f.hook_names[i]))) return false;
  }
  return !torch::jit::tracer::isTracing();
}

// The function that is `forward` of a module's class; null if it is something else.
inline PyObject* forward_of(const Function& f, PyObject* module, PyObject* attributes) {
  if (PyDict_GetItemWithError(attributes, f.name_forward) != nullptr) return nullptr;
  PyObject* forward = _PyType_Lookup(Py_TYPE(module), f.name_forward);
  return forward != nullptr && PyFunction_Check(forward) ? forward : nullptr;
}

inline PyObject* call(
    PyObject* function, PyObject* const* arguments, size_t number, PyObject* names) {
  const Function& f = the_function();
  if (PyVectorcall_NARGS(number) == 0) return f.in_python(function, arguments, number, names);
  PyObject* module = arguments[0];
  Entered entered(module);
  PyObject* forward = nullptr;
  if (is_inside(f) && !is_watched()) {
    Ref attributes(PyObject_GenericGetDict(module, nullptr));
    if (attributes && PyDict_Check(attributes.get()) && is_plain(f, module, attributes.get())) {
      forward = forward_of(f, module, attributes.get());
    }
  }
  PyErr_Clear();  // Python meets the same error, and says so
  if (forward == nullptr) return f.in_python(function, arguments, number, names);
  Ref held = Ref::to(forward);
  return PyObject_Vectorcall(forward, arguments, number, names);
}

// Calls of `function` come to `here`; where they went before.
inline vectorcallfunc redirect(PyObject* function, vectorcallfunc here) {
  auto* of_python = reinterpret_cast<PyFunctionObject*>(Py_NewRef(function));
  const vectorcallfunc before = of_python->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(of_python, here);
#else
  of_python->vectorcall = here;
#endif
  return before;
}

// call_modules(function, calls, implementation, globals, hooks): calls of `function`, which is
// `nn.Module.__call__`, come here; `hooks` are the names of the hooks of all modules.
inline PyObject* call_modules(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *function, *calls, *implementation, *globals;
  const char* hooks[kHooks];
  if (!PyArg_ParseTuple(
          given, "O!OOO!(ssss)", &PyFunction_Type, &function, &calls, &implementation,
          &PyDict_Type, &globals, &hooks[0], &hooks[1], &hooks[2], &hooks[3])) {
    return nullptr;
  }
  Function& f = the_function();
  if (f.in_python != nullptr) Py_RETURN_FALSE;
  const char* names[kHooks] = {
      "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};
  for (int i = 0; i < kHooks; ++i) {
    f.global_names[i] = PyUnicode_InternFromString(hooks[i]);
    f.hook_names[i] = PyUnicode_InternFromString(names[i]);
  }
  f.globals = Py_NewRef(globals);
  f.calls = Py_NewRef(calls);
  f.implementation = Py_NewRef(implementation);
  f.name_inside = PyUnicode_InternFromString("inside");
  f.name_implementation = PyUnicode_InternFromString("_call_impl");
  f.name_compiled = PyUnicode_InternFromString("_compiled_call_impl");
  f.name_forward = PyUnicode_InternFromString("forward");
  f.name_getattribute = PyUnicode_InternFromString("__getattribute__");
  f.getattribute = Py_XNewRef(_PyType_Lookup(&PyBaseObject_Type, f.name_getattribute));
  f.in_python = redirect(function, call);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

struct Attributes {
  vectorcallfunc in_python = nullptr;  // null: nobody comes here
  PyObject* tables[kTables];  // the attributes that have those of a module, in order
};

inline Attributes& the_attributes() {
  static Attributes* attributes = new Attributes();  // lives as long as the process
  return *attributes;
}

// A parameter, buffer or module by its name; null if the function has to look for it.
inline PyObject* attribute_of(const Attributes& a, PyObject* module, PyObject* name) {
  Ref attributes(PyObject_GenericGetDict(module, nullptr));
  if (!attributes || !PyDict_Check(attributes.get())) return nullptr;
  for (PyObject* each : a.tables) {
    PyObject* table = PyDict_GetItemWithError(attributes.get(), each);
    if (table == nullptr) continue;
    if (!PyDict_CheckExact(table)) return nullptr;
    PyObject* found = PyDict_GetItemWithError(table, name);
    if (found != nullptr) return Py_NewRef(found);
  }
  return nullptr;
}

inline PyObject* attribute(
    PyObject* function, PyObject* const* arguments, size_t number, PyObject* names) {
  const Attributes& a = the_attributes();
  if (PyVectorcall_NARGS(number) == 2 && names == nullptr && PyUnicode_CheckExact(arguments[1])) {
    PyObject* found = attribute_of(a, arguments[0], arguments[1]);
    if (found != nullptr) return found;
    PyErr_Clear();  // Python meets the same error, and says so
  }
  return a.in_python(function, arguments, number, names);
}

// find_attributes(function, tables): calls of `function`, which is `nn.Module.__getattr__`, come
// here; it looks into the tables of these names.
inline PyObject* find_attributes(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject* function;
  const char* tables[kTables];
  if (!PyArg_ParseTuple(
          given, "O!(sss)", &PyFunction_Type, &function, &tables[0], &tables[1], &tables[2])) {
    return nullptr;
  }
  Attributes& a = the_attributes();
  if (a.in_python != nullptr) Py_RETURN_FALSE;
  for (int i = 0; i < kTables; ++i) a.tables[i] = PyUnicode_InternFromString(tables[i]);
  a.in_python = redirect(function, attribute);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// modules(): those whose calls came here and are not over, on this thread, innermost first.
inline PyObject* modules(PyObject*, PyObject*) {
  const auto& called = being_called();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(called.size()));
  if (list == nullptr) return nullptr;
  Py_ssize_t place = 0;
  for (auto module = called.rbegin(); module != called.rend(); ++module) {
    PyList_SET_ITEM(list, place++, Py_NewRef(*module));
  }
  return list;
}

}  // namespace torpor::modules
