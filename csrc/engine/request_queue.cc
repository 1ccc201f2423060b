// SPDX-License-Identifier: Apache-2.0
#include "engine/request_queue.h"

#include <algorithm>
#include <utility>

#include "engine/agreement.h"

namespace torch_ring {

namespace {

constexpr std::size_t kNameBytes = 4096;

}  // namespace

std::shared_ptr<Work> RequestQueue::make_work(Request&& request) {
  if (request.fingerprint.name.starts_with('#')) {
    throw Error(ErrorKind::kInvalidArgument,
                "the name '" + request.fingerprint.name + "' is reserved: it begins with #");
  }
  if (request.fingerprint.name.size() > kNameBytes) {
    throw Error(ErrorKind::kInvalidArgument, "a name is longer than 4096 bytes: give a short one");
  }
  auto work = std::make_shared<Work>(std::move(request));
  work->submitted_ = Clock::now();
  return work;
}

void RequestQueue::add(const Lock&, std::span<const std::shared_ptr<Work>> works) {
  for (std::size_t i = 0; i < works.size(); ++i) {
    Work& work = *works[i];
    Fingerprint& fingerprint = work.request_.fingerprint;
    const bool numbered = fingerprint.name.empty();
    if (numbered && fingerprint.group > 0 && i > 0) {
      // A group has one number, so that ranks with groups of different sizes stay in step.
      fingerprint.name = works.front()->request_.fingerprint.name + "/" + std::to_string(i);
    } else if (numbered) {
      fingerprint.name = names_.next(fingerprint.collective);
    }
    work.key_ = key_of(fingerprint);
    if (numbered) {
      work.among_threads_ = are_threads(work.request_.thread);
      continue;
    }
    if (!in_flight_.emplace(work.key_, &work).second) {
      for (std::size_t earlier = 0; earlier < i; ++earlier) in_flight_.erase(works[earlier]->key_);
      throw Error(ErrorKind::kInvalidArgument,
                  rank_name_ + ": " + fingerprint.describe() +
                      " is in flight already: wait for its handle first, or give another name");
    }
  }
  for (const auto& work : works) {
    const Fingerprint& fingerprint = work->request_.fingerprint;
    if (!fingerprint.on_host()) add_on_device(work);
    recorder_.submitted(*work);
    works_.push_back(work);
    bytes_ += fingerprint.count() * size_of(fingerprint.dtype);
  }
  has_works_.store(true, std::memory_order_release);
  const auto self = std::this_thread::get_id();
  if (submitter_ == std::thread::id()) submitter_ = self;
  has_several_submitters_ = has_several_submitters_ || submitter_ != self;
}

/// Whether another thread than this one has submitted one of the last requests without a name.
bool RequestQueue::are_threads(std::thread::id thread) {
  if (numbering_ == thread) {
    alone_ = std::min(alone_ + 1, kRecent);
  } else if (std::exchange(numbering_, thread) != std::thread::id()) {
    alone_ = 0;
  }
  return alone_ < kRecent;
}

/// Records a work on a device, and the number of launches before it, which the ranks compare.
void RequestQueue::add_on_device(const std::shared_ptr<Work>& work) {
  const auto is_over = [](const std::weak_ptr<Work>& earlier) {
    const auto alive = earlier.lock();
    return !alive || alive->done();
  };
  while (!on_device_.empty() && is_over(on_device_.front())) on_device_.pop_front();
  work->launches_ = launches_;
  on_device_.push_back(work);
}

std::shared_ptr<Work> RequestQueue::first_on_device(const Lock&) {
  for (; !on_device_.empty(); on_device_.pop_front()) {
    auto work = on_device_.front().lock();
    if (work && !work->done()) return work;
  }
  return nullptr;
}

void RequestQueue::take(const Lock&, std::deque<std::shared_ptr<Work>>& works) {
  for (auto& work : works_) works.push_back(std::move(work));
  works_.clear();
  bytes_ = 0;
  has_works_.store(false, std::memory_order_relaxed);
}

void RequestQueue::fail(const Lock&, Work& work, const Error& cause) {
  free_name(work);
  const std::string request = work.request_.fingerprint.describe();
  std::string text = cause.what();
  if (!text.starts_with(request + ": ")) text = request + ": " + text;
  text = rank_name_ + ": " + text;
  recorder_.failed(work, text);
  work.fail(Error(cause.kind(), text));
}

}  // namespace torch_ring
