// SPDX-License-Identifier: Apache-2.0
#include "ucx/worker.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/error.h"

namespace torch_ring::ucx {

namespace {

// The version whose interface api.h declares: init() refuses a library that has another.
constexpr unsigned kMajor = 1;
constexpr unsigned kMinor = 16;

// Prefixes of the transports between hosts: TCP; those of InfiniBand, RoCE and Omni-Path; AWS' EFA.
// Others stay inside a host.
constexpr std::array kBetweenHosts{"tcp", "rc_", "dc_", "ud_", "srd"};
constexpr std::chrono::seconds kProbeTimeout{1};

/// Blocks all signals of this thread, and so of the threads that it starts: signals go to the
/// program's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

Worker::Worker(Api api) : api_(std::move(api)) {
  const SignalsBlocked blocked;
  try {
    Config config = nullptr;
    check(api_.config_read(nullptr, nullptr, &config), "ucp_config_read");
    const Params params;
    Status status =
        api_.config_modify(config, "RNDV_THRESH", std::to_string(kEagerBytes + 1).c_str());
    // With it a receive ends only when the sender's request can end, too. UCX's default since 1.16.
    if (status == kOk) status = api_.config_modify(config, "PROTO_ENABLE", "y");
    if (status == kOk) status = api_.init(kMajor, kMinor, &params, config, &context_);
    api_.config_release(config);
    check(status, "ucp_init");
    const WorkerParams worker_params;
    check(api_.worker_create(context_, &worker_params, &worker_), "ucp_worker_create");

    void* address = nullptr;
    std::size_t bytes = 0;
    check(api_.worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
    const auto* first = static_cast<const std::byte*>(address);
    address_.assign(first, first + bytes);
    api_.worker_release_address(worker_, address);

    check(api_.worker_get_efd(worker_, &fd_), "ucp_worker_get_efd");
  } catch (...) {
    close();
    throw;
  }
}

Worker::~Worker() { close(); }

void Worker::close() noexcept {
  if (worker_) api_.worker_destroy(worker_);
  if (context_) api_.cleanup(context_);
}

std::vector<std::string> Worker::transports() {
  EndpointParams params;
  params.address = address_.data();
  params.on_error = [](void*, Endpoint, Status) {};
  Endpoint endpoint = nullptr;
  if (api_.ep_create(worker_, &params, &endpoint) != kOk) return {};
  std::array<TransportEntry, 32> found{};
  EndpointAttributes attributes;
  attributes.transports = found.data();
  attributes.count = found.size();
  const Status status = api_.ep_query(endpoint, &attributes);

  RequestParams force;
  force.fields = RequestParams::kFlags;
  force.flags = RequestParams::kForce;
  const StatusPointer closing = api_.ep_close(endpoint, &force);
  if (closing && !is_error(closing)) {
    const auto deadline = Clock::now() + kProbeTimeout;
    while (api_.request_check_status(closing) == kInProgress && Clock::now() < deadline) progress();
    api_.request_free(closing);
  }
  check(status, "ucp_ep_query");
  std::vector<std::string> names;
  for (unsigned i = 0; i < std::min<std::size_t>(attributes.count, found.size()); ++i) {
    const std::string name = found[i].name;
    const bool crosses_hosts = std::ranges::any_of(
        kBetweenHosts, [&](const char* prefix) { return name.starts_with(prefix); });
    if (crosses_hosts && std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

bool Worker::arm() {
  while (progress()) {
  }
  if (std::exchange(has_moved_, false)) return false;
  const Status status = api_.worker_arm(worker_);
  if (status != kBusy) check(status, "ucp_worker_arm");
  return status != kBusy;
}

void Worker::check(Status status, const char* call) const {
  if (status == kOk) return;
  throw Error(ErrorKind::kInternal, "UCX " + api_.version + " (" + api_.path + "): " + call + ": " +
                                        api_.status_string(status));
}

}  // namespace torch_ring::ucx
