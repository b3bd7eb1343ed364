// A compiled step as a tape: what its pieces do, one thing after the other, without Python.
//
// Inductor's modules for a CPU are Python functions that allocate, call kernels and ops, and let go.
// backends/inductor/tape.py reads them; here is what they said. Tensors lie in numbered slots.
// A tape does not change once it is made, and runs without the GIL. Whatever may fail stands in it
// before the first action that writes over a parameter (`_committing` in taped.py).

#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/inductor_ops.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "objects.h"

namespace torpor::tape {

// A kernel is called with the next larger of these numbers of arguments: those it does not know of
// lie on the stack, which its caller clears. An optimizer's step may be one kernel for many parameters.
constexpr std::array<size_t, 6> kArguments{16, 64, 192, 512, 1024, 2048};
constexpr size_t kMostArguments = kArguments.back();

struct Layout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct Empty {
  size_t to;
  Layout layout;
  at::ScalarType dtype;
};

struct Part {  // other sizes and strides on the same memory
  size_t to;
  size_t from;
  Layout layout;
  int64_t offset;
};

struct Alias {
  size_t to;
  size_t from;
};

struct Constant {
  size_t to;
  at::Tensor tensor;
};

struct Kernel {
  void* function;
  std::vector<std::pair<bool, int64_t>> arguments;  // is it a slot; the slot or the number
};

struct Call {
  c10::OperatorHandle op;
  torch::jit::Stack given;  // as far as it is known
  std::vector<std::pair<size_t, size_t>> tensors;  // argument, slot
  std::vector<std::pair<size_t, std::vector<std::pair<bool, size_t>>>> lists;  // is there one; slot
  std::vector<size_t> results;  // slots; none if nobody wants them
};

struct Shaped {  // what the code was compiled for
  size_t slot;
  Layout layout;
  std::string said;
  std::optional<at::ScalarType> dtype;  // then there may be no tensor
};

struct Aligned {
  size_t slot;
  int64_t bytes;
};

struct Flag {  // a tensor that says whether a piece went well
  size_t slot;
  int64_t piece;
};

struct Free {
  std::vector<size_t> slots;
};

struct Guarded {  // code may return a parameter in the place of a copy of it
  std::vector<size_t> written;  // parameters that are written over from here on
  std::vector<size_t> kept;  // what is read after that
};

struct Copies {  // results that are written over parameters when all has run
  std::vector<std::pair<size_t, size_t>> written;  // parameter, result
};

using Action = std::variant<
    Empty, Part, Alias, Constant, Kernel, Call, Shaped, Aligned, Flag, Free, Guarded, Copies>;

struct Tape {
  std::vector<Action> actions;
  size_t slots = 0;
  std::vector<size_t> inputs;
  std::vector<size_t> results;
};

// -- running --------------------------------------------------------------------------------------

using Words = std::array<void*, kMostArguments>;

template <size_t... I>
void call_with(void* function, const Words& words, std::index_sequence<I...>) {
  using Function = void (*)(std::enable_if_t<(I, true), void*>...);
  reinterpret_cast<Function>(function)(words[I]...);
}

template <size_t N>
void call_kernel(void* function, const Words& words) {
  call_with(function, words, std::make_index_sequence<N>());
}

using Caller = void (*)(void*, const Words&);

template <size_t... I>
constexpr std::array<Caller, sizeof...(I)> callers(std::index_sequence<I...>) {
  return {call_kernel<kArguments[I]>...};
}

extern "C" {  // of the libraries that torch uses, where it does
int omp_get_max_threads() __attribute__((weak));
void omp_set_num_threads(int) __attribute__((weak));
int MKL_Set_Num_Threads_Local(int) __attribute__((weak));
}

// This thread has one core. torch.set_num_threads would also change what new threads get.
class OneCore {
 public:
  explicit OneCore(bool wanted) : on_(wanted && omp_get_max_threads && omp_set_num_threads) {
    if (!on_) return;
    at::get_num_threads();  // sets the thread up: asked later, it would undo this
    before_ = omp_get_max_threads();
    omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local) mkl_before_ = MKL_Set_Num_Threads_Local(1);
  }
  OneCore(const OneCore&) = delete;
  OneCore& operator=(const OneCore&) = delete;
  ~OneCore() {
    if (!on_) return;
    omp_set_num_threads(before_);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_before_);
  }

 private:
  bool on_;
  int before_ = 0;
  int mkl_before_ = 0;
};

class Run {  // one of a tape; a flag that is not set ends it
 public:
  explicit Run(const Tape& tape) : tape_(tape), slots_(tape.slots) {}

  std::vector<at::Tensor>& slots() { return slots_; }

  // The number of the piece whose flag was not set; -1: all went well.
  int64_t operator()() {
    for (const Action& action : tape_.actions) {
      std::visit([this](const auto& one) { act(one); }, action);
      if (failed_ >= 0) break;
    }
    return failed_;
  }

 private:
  void act(const Empty& one) {
    slots_[one.to] =
        at::detail::empty_strided_cpu(one.layout.sizes, one.layout.strides, one.dtype);
  }
  void act(const Part& one) {
    slots_[one.to] = torch::inductor::_reinterpret_tensor(
        slots_[one.from], one.layout.sizes, one.layout.strides, one.offset);
  }
  void act(const Alias& one) { slots_[one.to] = slots_[one.from]; }
  void act(const Constant& one) { slots_[one.to] = one.tensor; }
  void act(const Kernel& one) {
    static constexpr auto by_count = callers(std::make_index_sequence<kArguments.size()>());
    Words words;
    size_t count = 0;
    for (const auto& [is_slot, value] : one.arguments) {
      words[count++] =
          is_slot ? slots_[value].data_ptr() : reinterpret_cast<void*>(static_cast<intptr_t>(value));
    }
    const size_t which =
        std::lower_bound(kArguments.begin(), kArguments.end(), count) - kArguments.begin();
    std::fill(words.begin() + count, words.begin() + kArguments[which], nullptr);
    by_count[which](one.function, words);
  }
  void act(const Call& one) {
    torch::jit::Stack stack = one.given;
    for (const auto& [place, slot] : one.tensors) stack[place] = slots_[slot];
    for (const auto& [place, list] : one.lists) stack[place] = listed(one, place, list);
    one.op.callBoxed(stack);
    if (!one.results.empty() && stack.at(0).isTensorList()) {
      auto list = std::move(stack.at(0)).toTensorVector();
      for (size_t i = 0; i < one.results.size(); ++i) slots_[one.results[i]] = std::move(list.at(i));
      return;
    }
    for (size_t i = 0; i < one.results.size(); ++i) {
      auto& value = stack.at(i);
      slots_[one.results[i]] = value.isTensor() ? std::move(value).toTensor() : at::Tensor();
    }
  }
  void act(const Shaped& one) {
    const at::Tensor& tensor = slots_[one.slot];
    if (one.dtype) {
      if (!tensor.defined()) return;
      TORCH_CHECK(tensor.scalar_type() == *one.dtype, one.said, ": dtype ", tensor.scalar_type(),
                  " where the code was compiled for ", *one.dtype);
    }
    if (tensor.sizes() == c10::IntArrayRef(one.layout.sizes)) {
      const auto strides = tensor.strides();
      bool same = true;
      for (size_t i = 0; i < one.layout.sizes.size(); ++i) {
        same &= one.layout.sizes[i] <= 1 || strides[i] == one.layout.strides[i];
      }
      if (same || tensor.numel() == 0) return;
    }
    TORCH_CHECK(false, one.said, ": sizes ", tensor.sizes(), " and strides ", tensor.strides(),
                " where the code was compiled for ", one.layout.sizes, " and ", one.layout.strides);
  }
  void act(const Aligned& one) {
    const at::Tensor& tensor = slots_[one.slot];  // the address itself is not looked at, as by torch
    const int64_t start = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    TORCH_CHECK(start % one.bytes == 0, "a tensor is not aligned to ", one.bytes, " bytes");
  }
  void act(const Flag& one) {
    if (!*slots_[one.slot].const_data_ptr<bool>()) failed_ = one.piece;
  }
  void act(const Free& one) {
    for (size_t slot : one.slots) slots_[slot].reset();
  }
  void act(const Guarded& one) {
    std::unordered_set<const void*> written;
    for (size_t parameter : one.written) written.insert(memory_of(parameter));
    for (size_t slot : one.kept) {
      if (written.count(memory_of(slot))) slots_[slot] = slots_[slot].clone();
    }
  }
  void act(const Copies& one) {
    for (const auto& [parameter, result] : one.written) slots_[parameter].copy_(slots_[result]);
  }

  const void* memory_of(size_t slot) const {
    return slots_[slot].storage().unsafeGetStorageImpl();
  }

  c10::IValue listed(
      const Call& call, size_t place, const std::vector<std::pair<bool, size_t>>& list) const {
    const auto& type = call.op.schema().arguments()[place].type();
    if (type->isSubtypeOf(*c10::ListType::ofTensors())) {
      c10::List<at::Tensor> tensors;
      for (const auto& [is_there, slot] : list) tensors.push_back(slots_[slot]);
      return tensors;
    }
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& [is_there, slot] : list) {
      tensors.push_back(is_there ? std::optional(slots_[slot]) : std::nullopt);
    }
    return tensors;
  }

  const Tape& tape_;
  std::vector<at::Tensor> slots_;
  int64_t failed_ = -1;
};

// -- made of what Python says ---------------------------------------------------------------------

inline Layout layout_of(const py::handle& sizes, const py::handle& strides) {
  return {sizes.cast<std::vector<int64_t>>(), strides.cast<std::vector<int64_t>>()};
}

inline Call call_of(const py::tuple& said) {
  // name, overload, constants by argument, tensors, lists, results
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      said[1].cast<std::string>().c_str(), said[2].cast<std::string>().c_str());
  Call call{op, {}, {}, {}, {}};
  const auto& arguments = op.schema().arguments();
  call.given.resize(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].default_value()) call.given[i] = *arguments[i].default_value();
  }
  for (const auto& item : said[3].cast<py::dict>()) {
    const auto place = item.first.cast<size_t>();
    call.given[place] = torch::jit::toIValue(item.second, arguments[place].type(), arguments[place].N());
  }
  call.tensors = said[4].cast<decltype(call.tensors)>();
  call.lists = said[5].cast<decltype(call.lists)>();
  call.results = said[6].cast<decltype(call.results)>();
  return call;
}

inline Action action_of(const py::tuple& said) {
  const auto kind = said[0].cast<std::string>();
  const auto slot = [&said](size_t place) { return said[place].cast<size_t>(); };
  const auto dtype = [&said](size_t place) {
    const py::object given = said[place];
    TORCH_CHECK_TYPE(THPDtype_Check(given.ptr()), "a dtype is needed");
    return reinterpret_cast<THPDtype*>(given.ptr())->scalar_type;
  };
  if (kind == "empty") return Empty{slot(1), layout_of(said[2], said[3]), dtype(4)};
  if (kind == "part") {
    return Part{slot(1), slot(2), layout_of(said[3], said[4]), said[5].cast<int64_t>()};
  }
  if (kind == "alias") return Alias{slot(1), slot(2)};
  if (kind == "constant") return Constant{slot(1), said[2].cast<at::Tensor>()};
  if (kind == "kernel") {
    Kernel kernel{reinterpret_cast<void*>(said[1].cast<uintptr_t>()),
                  said[2].cast<decltype(Kernel::arguments)>()};
    TORCH_CHECK_VALUE(kernel.arguments.size() <= kMostArguments, "too many arguments");
    return kernel;
  }
  if (kind == "call") return call_of(said);
  if (kind == "shaped") {
    Shaped shaped{slot(1), layout_of(said[2], said[3]), said[4].cast<std::string>(), {}};
    if (said.size() > 5) shaped.dtype = dtype(5);
    return shaped;
  }
  if (kind == "aligned") return Aligned{slot(1), said[2].cast<int64_t>()};
  if (kind == "flag") return Flag{slot(1), said[2].cast<int64_t>()};
  if (kind == "guarded") {
    return Guarded{said[1].cast<std::vector<size_t>>(), said[2].cast<std::vector<size_t>>()};
  }
  if (kind == "copies") return Copies{said[1].cast<decltype(Copies::written)>()};
  TORCH_CHECK_VALUE(kind == "free", "no action ", kind);
  return Free{said[1].cast<std::vector<size_t>>()};
}

constexpr const char* kTape = "torpor.tape";

// tape(actions, slots, inputs, results): a tape, for `run_tape`.
inline PyObject* make_tape(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const auto given = py::reinterpret_borrow<py::tuple>(arguments);
  auto tape = std::make_unique<Tape>();
  for (const auto& action : given[0].cast<py::list>()) {
    tape->actions.push_back(action_of(action.cast<py::tuple>()));
  }
  tape->slots = given[1].cast<size_t>();
  tape->inputs = given[2].cast<std::vector<size_t>>();
  tape->results = given[3].cast<std::vector<size_t>>();
  PyObject* capsule = PyCapsule_New(tape.get(), kTape, [](PyObject* object) {
    delete static_cast<Tape*>(PyCapsule_GetPointer(object, kTape));
  });
  if (capsule != nullptr) tape.release();
  return capsule;
  END_HANDLE_TH_ERRORS
}

// run_tape(tape, tensors, one_core): its results, or the number of the piece that refused its arguments. The
// list of tensors is emptied.
inline PyObject* run_tape(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *capsule, *given;
  int one_core;
  if (!PyArg_ParseTuple(arguments, "OO!p", &capsule, &PyList_Type, &given, &one_core)) {
    return nullptr;
  }
  const auto* tape = static_cast<const Tape*>(PyCapsule_GetPointer(capsule, kTape));
  if (tape == nullptr) return nullptr;
  const auto count = static_cast<size_t>(PyList_GET_SIZE(given));
  TORCH_CHECK_VALUE(count == tape->inputs.size(), "the tape takes ", tape->inputs.size(),
                    " tensors, not ", count);
  Run run(*tape);
  for (size_t i = 0; i < count; ++i) {
    PyObject* tensor = PyList_GET_ITEM(given, i);
    TORCH_CHECK_TYPE(THPVariable_Check(tensor), "a tape takes tensors");
    run.slots()[tape->inputs[i]] = THPVariable_Unpack(tensor);
  }
  if (PyList_SetSlice(given, 0, count, nullptr) < 0) return nullptr;
  int64_t failed;
  {
    py::gil_scoped_release without_gil;
    OneCore guard(one_core);
    failed = run();
  }
  if (failed >= 0) return PyLong_FromLongLong(failed);
  Ref results = checked(PyList_New(static_cast<Py_ssize_t>(tape->results.size())));
  for (size_t i = 0; i < tape->results.size(); ++i) {
    PyList_SET_ITEM(
        results.get(), i, checked(THPVariable_Wrap(run.slots()[tape->results[i]])).release());
  }
  return results.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace torpor::tape
