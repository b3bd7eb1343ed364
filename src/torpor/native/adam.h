// Steps of Adam and AdamW on plain parameters on a CPU, with the bits of torch's own loop over them.
//
// That loop calls about twelve ops for each parameter, from Python. Here the same roundings happen in
// the same order, but block by block, so that a block stays in the cache, and for small parameters
// together. Products and sums are fused where torch's kernels fuse them (`std::fma`), and `sqrt` is
// torch's, whose last bit is not the processor's. The caller tries out whether that is so on this
// machine (frontend/adam.py).

#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "objects.h"

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TORPOR_VECTORIZED \
  __attribute__((optimize("O3"), target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TORPOR_VECTORIZED
#endif

namespace torpor::adam {

constexpr int64_t kBlock = 4096;  // elements
constexpr int64_t kSerial = 32768;  // elements of a tensor that torch leaves to one thread

struct Settings {
  double rate, beta1, beta2, decay, epsilon;
  bool maximize, decoupled;
};

// The numbers of a step, rounded as torch rounds those that it passes to ops.
struct Numbers {
  Numbers(const Settings& s, double step)
      : shrink(1 - s.rate * s.decay),
        decay(s.decay),
        weight(nearer(1 - s.beta1)),
        beta2(s.beta2),
        rest2(1 - s.beta2),
        root(std::pow(1 - std::pow(s.beta2, step), 0.5)),
        epsilon(s.epsilon),
        rate(-(s.rate / (1 - std::pow(s.beta1, step)))),
        from_gradient(weight != static_cast<float>(1 - s.beta1)),
        shrinks(s.decay != 0 && s.decoupled),
        decays(s.decay != 0 && !s.decoupled),
        maximize(s.maximize) {}

  // torch interpolates from the end that is nearer
  static float nearer(double weight) {
    const float rounded = weight;
    return rounded < 0.5F ? rounded : rounded - 1.0F;
  }

  float shrink, decay, weight, beta2, rest2, root, epsilon, rate;
  bool from_gradient, shrinks, decays, maximize;
};

struct Parameter {
  float *values, *average, *squares;  // the parameter and its moments
  const float* gradient;
  Numbers numbers;
};

struct Segment {  // of a parameter
  const Parameter* parameter;
  int64_t start, size;
};

TORPOR_VECTORIZED
void update_moments(
    const Numbers n, float* __restrict values, const float* __restrict gradient,
    float* __restrict average, float* __restrict squares, float* __restrict copy, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    float g = n.maximize ? -gradient[i] : gradient[i];
    if (n.shrinks) values[i] *= n.shrink;
    if (n.decays) g = std::fma(n.decay, values[i], g);
    average[i] = std::fma(n.weight, g - average[i], n.from_gradient ? g : average[i]);
    squares[i] = copy[i] = std::fma(n.rest2 * g, g, squares[i] * n.beta2);
  }
}

TORPOR_VECTORIZED
void update_values(
    const Numbers n, float* __restrict values, const float* __restrict average,
    const float* __restrict roots, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float denominator = roots[i] / n.root + n.epsilon;
    const float change = n.rate * average[i] / denominator;
    values[i] += change;
  }
}

class Step {
 public:
  // False: it is Python's to do. Nothing is written before `run`.
  bool add(
      const Settings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
      const at::Tensor& average, const at::Tensor& squares, const at::Tensor& counter);
  bool is_apart() const;  // what is written shares its memory with nothing else
  void run();

 private:
  void split();
  void run_part(int64_t part, int64_t parts);
  static void run_on_thread(void* step) {
    auto* self = static_cast<Step*>(step);
    self->run_part(omp_get_thread_num(), self->threads_);
  }

  std::vector<Parameter> parameters_;
  std::vector<at::Tensor> counters_, read_;
  std::vector<std::pair<at::Tensor, int>> written_;  // and how often torch writes to it
  std::vector<int64_t> sizes_;
  std::vector<std::vector<Segment>> batches_;  // of at most `kBlock` elements
  int64_t threads_ = 1;
};

inline bool is_exact(PyObject* object) {  // no subclass, which may do something else
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == THPVariableClass || type == ParameterClass;
}

inline bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet special{
      c10::DispatchKey::Python, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
      c10::DispatchKey::ZeroTensor};
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
      tensor.scalar_type() == at::kFloat && tensor.is_non_overlapping_and_dense() &&
      !tensor.is_inference() && !tensor.key_set().has_any(special);
}

inline bool Step::add(
    const Settings& settings, const at::Tensor& parameter, const at::Tensor& gradient,
    const at::Tensor& average, const at::Tensor& squares, const at::Tensor& counter) {
  if (!is_plain(counter) || counter.numel() != 1) return false;
  for (const at::Tensor* one : {&parameter, &average, &squares, &counter}) {
    if (one->is_view()) return false;
  }
  for (const at::Tensor* one : {&parameter, &gradient, &average, &squares}) {
    if (!is_plain(*one) || !one->sizes().equals(parameter.sizes()) ||
        !one->strides().equals(parameter.strides())) {
      return false;
    }
  }
  const double step = double{*counter.const_data_ptr<float>() + 1.0F};
  parameters_.push_back({
      parameter.mutable_data_ptr<float>(), average.mutable_data_ptr<float>(),
      squares.mutable_data_ptr<float>(), gradient.const_data_ptr<float>(),
      Numbers(settings, step)});
  sizes_.push_back(parameter.numel());
  read_.push_back(gradient);
  counters_.push_back(counter);
  written_.insert(written_.end(), {
      {parameter, parameters_.back().numbers.shrinks ? 2 : 1}, {average, 1}, {squares, 2},
      {counter, 1}});
  return true;
}

inline bool Step::is_apart() const {
  struct Range {
    const char *start, *end;
    bool is_written;
  };
  std::vector<Range> ranges;
  const auto add = [&ranges](const at::Tensor& tensor, bool is_written) {
    const char* start = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.numel() != 0) ranges.push_back({start, start + tensor.nbytes(), is_written});
  };
  for (const auto& tensor : read_) add(tensor, false);
  for (const auto& [tensor, times] : written_) add(tensor, true);
  std::sort(ranges.begin(), ranges.end(), [](auto& a, auto& b) { return a.start < b.start; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    const auto &before = ranges[i - 1], &here = ranges[i];
    if (here.start < before.end && (here.is_written || before.is_written)) return false;
    if (here.start < before.end && here.end < before.end) return false;  // it may hide another
  }
  return true;
}

inline void Step::split() {
  int64_t left = 0, all = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    all += sizes_[i];
    for (int64_t start = 0; start < sizes_[i];) {
      if (left == 0) {
        batches_.emplace_back();
        left = kBlock;
      }
      const int64_t size = std::min(left, sizes_[i] - start);
      batches_.back().push_back({&parameters_[i], start, size});
      start += size;
      left -= size;
    }
  }
  // in a forked child threads may be gone: nothing is lost where torch would have asked for them too
  const bool is_large = std::any_of(
      sizes_.begin(), sizes_.end(), [](int64_t size) { return size >= kSerial; });
  if (is_large && GOMP_parallel && omp_get_thread_num && !at::in_parallel_region()) {
    threads_ = std::min<int64_t>(at::get_num_threads(), (all + kSerial - 1) / kSerial);
  }
}

inline void Step::run() {
  split();
  if (threads_ > 1) {
    GOMP_parallel(run_on_thread, this, static_cast<unsigned>(threads_), 0);
  } else {
    run_part(0, 1);
  }
  for (const auto& counter : counters_) *counter.mutable_data_ptr<float>() += 1.0F;
  for (const auto& [tensor, times] : written_) {
    for (int i = 0; i < times; ++i) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

inline void Step::run_part(int64_t part, int64_t parts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t number = static_cast<int64_t>(batches_.size());
  const int64_t first = number * part / parts, last = number * (part + 1) / parts;
  if (first == last) return;
  const auto squares = at::empty({kBlock}, at::kFloat), roots = at::empty({kBlock}, at::kFloat);
  float* const copies = squares.mutable_data_ptr<float>();
  const float* const found = roots.const_data_ptr<float>();
  for (int64_t i = first; i < last; ++i) {
    int64_t filled = 0;
    for (const auto& [parameter, start, size] : batches_[i]) {
      const auto& p = *parameter;
      update_moments(
          p.numbers, p.values + start, p.gradient + start, p.average + start, p.squares + start,
          copies + filled, size);
      filled += size;
    }
    auto out = roots.narrow(0, 0, filled);
    at::sqrt_out(out, squares.narrow(0, 0, filled));
    filled = 0;
    for (const auto& [parameter, start, size] : batches_[i]) {
      const auto& p = *parameter;
      update_values(p.numbers, p.values + start, p.average + start, found + filled, size);
      filled += size;
    }
  }
}

// Nobody sees the ops of this thread, and gradients are off.
inline bool is_unobserved() {
  constexpr c10::DispatchKeySet observers{
      c10::DispatchKey::Python, c10::DispatchKey::Functionalize};
  return !c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
      !at::hasCallbacks() && !at::impl::torch_function_mode_enabled() &&
      !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !c10::impl::tls_local_dispatch_key_set().included_.has_any(observers);
}

// adam(parameters, gradients, averages, averages of squares, counters of steps, rate, beta1, beta2,
// weight decay, epsilon, maximize, decoupled weight decay): whether the step was made.
inline PyObject* adam(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* lists[5];
  Settings settings;
  int maximize, decoupled;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!O!O!dddddpp", &PyList_Type, &lists[0], &PyList_Type, &lists[1],
          &PyList_Type, &lists[2], &PyList_Type, &lists[3], &PyList_Type, &lists[4],
          &settings.rate, &settings.beta1, &settings.beta2, &settings.decay, &settings.epsilon,
          &maximize, &decoupled)) {
    return nullptr;
  }
  settings.maximize = maximize != 0;
  settings.decoupled = decoupled != 0;
  const auto is_fraction = [](double beta) { return beta >= 0 && beta < 1; };
  if (!is_unobserved() || !is_fraction(settings.beta1) || !is_fraction(settings.beta2)) {
    Py_RETURN_FALSE;
  }
  Step step;
  const Py_ssize_t size = PyList_GET_SIZE(lists[0]);
  for (PyObject* list : lists) {
    if (PyList_GET_SIZE(list) != size) Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    at::Tensor found[5];
    for (int j = 0; j < 5; ++j) {
      PyObject* tensor = PyList_GET_ITEM(lists[j], i);
      if (!is_exact(tensor)) Py_RETURN_FALSE;
      found[j] = THPVariable_Unpack(tensor);
    }
    if (!step.add(settings, found[0], found[1], found[2], found[3], found[4])) Py_RETURN_FALSE;
  }
  if (!step.is_apart()) Py_RETURN_FALSE;
  step.run();
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace torpor::adam
