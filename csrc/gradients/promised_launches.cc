// SPDX-License-Identifier: Apache-2.0
#include "gradients/promised_launches.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <limits>
#include <utility>

#include "bindings/accelerator.h"
#include "bindings/requests.h"
#include "bindings/torch_call.h"

namespace torch_ring {

void PromisedLaunches::begin(std::vector<Item> promised, c10::Device device, bool in_backward) {
  const auto self = std::this_thread::get_id();
  std::vector<std::thread::id> threads{self};
  {
    const std::scoped_lock lock(mutex_);
    keep();
    if (!in_backward) program_ = self;
    threads.push_back(program_);
    promised_ = std::move(promised);
    device_ = device;
    next_ = left_ = 0;
    is_interrupted_ = false;
  }
  watch(std::move(threads));
}

bool PromisedLaunches::is_interrupted() {
  const std::scoped_lock lock(mutex_);
  return is_interrupted_;
}

std::optional<Launched> PromisedLaunches::launch(const at::Tensor& tensor, bool gathers) {
  const std::scoped_lock lock(mutex_);
  const Item item{gathers, tensor.numel(), tensor.scalar_type() == at::kDouble};
  if (is_interrupted_ || next_ == promised_.size() || promised_[next_] != item) return std::nullopt;
  return launch_next(tensor);
}

std::size_t PromisedLaunches::end() {
  {
    const std::scoped_lock lock(mutex_);
    keep();
    promised_.clear();
    next_ = 0;
  }
  if (const auto engine = engine_.lock()) engine->set_watch(nullptr);
  const std::scoped_lock lock(mutex_);
  return std::exchange(left_, 0);
}

std::int64_t PromisedLaunches::place() const {
  const auto launches = running(engine_)->launches();
  return launches ? std::int64_t{*launches} : -1;
}

/// Launches promised_[next_]. Nothing on the device is pending, so this waits for no agreement.
Launched PromisedLaunches::launch_next(const at::Tensor& tensor) {
  const bool gathers = promised_[next_++].gathers;
  const at::Tensor output = gathers ? empty_result(tensor, {size_, tensor.numel()}) : tensor;
  const Collective collective = gathers ? Collective::kAllgather : Collective::kAllreduce;
  const Fingerprint what = fingerprint_of({.collective = collective, .name = "promised"}, tensor);
  return launch_plain(engine_, what, tensor, output, recorded_now(tensor.device()), true);
}

/// Launches NaN for the rest of the promise.
void PromisedLaunches::keep() {
  const at::NoGradGuard no_grad;
  while (next_ < promised_.size()) {
    ++left_;
    const Item& item = promised_[next_];
    const auto options =
        at::TensorOptions(device_).dtype(item.is_double ? at::kDouble : at::kFloat);
    launch_next(at::full({item.count}, std::numeric_limits<double>::quiet_NaN(), options));
  }
}

void PromisedLaunches::watch(std::vector<std::thread::id> threads) {
  const auto call = [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    const std::scoped_lock lock(self->mutex_);
    self->is_interrupted_ = true;
    torch_call([&] { self->keep(); });
  };
  running(engine_)->set_watch(
      std::make_shared<const Engine::Watch>(Engine::Watch{std::move(threads), call}));
}

}  // namespace torch_ring
