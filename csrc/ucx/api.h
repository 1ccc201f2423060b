// SPDX-License-Identifier: Apache-2.0
// Api: the part of UCX's C interface that torch_ring uses. UCX is found at run time, so a build
// does not need it. tests/cpp/ucx_api_test.cc compares these declarations with the real ucp.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/symbols.h"

namespace torch_ring::ucx {

/// ucs_status_t; every negative one is an error.
using Status = std::int8_t;
inline constexpr Status kOk = 0;
inline constexpr Status kInProgress = 1;
inline constexpr Status kBusy = -15;
inline constexpr Status kCanceled = -16;
inline constexpr Status kLastError = -100;

struct OpaqueContext;
using Context = OpaqueContext*;  // ucp_context_h
struct OpaqueWorker;
using WorkerHandle = OpaqueWorker*;  // ucp_worker_h
struct OpaqueEndpoint;
using Endpoint = OpaqueEndpoint*;  // ucp_ep_h
struct OpaqueMessage;
using Message = OpaqueMessage*;  // ucp_tag_message_h
struct OpaqueConfig;
using Config = OpaqueConfig*;  // ucp_config_t*

/// ucs_status_ptr_t: null (done), an error, or a request.
using StatusPointer = void*;
inline bool is_error(StatusPointer pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) >=
         static_cast<std::uintptr_t>(static_cast<std::intptr_t>(kLastError));
}
inline Status error_of(StatusPointer pointer) {
  return static_cast<Status>(reinterpret_cast<std::intptr_t>(pointer));
}
inline StatusPointer pointer_of(Status status) {
  return reinterpret_cast<StatusPointer>(static_cast<std::intptr_t>(status));
}

// The structures are prefixes of UCX's: it reads only the fields that `fields` names.

/// ucp_params_t
struct Params {
  static constexpr std::uint64_t kFeatures = 1u << 0;
  static constexpr std::uint64_t kTag = 1u << 0;     // of `features`
  static constexpr std::uint64_t kWakeup = 1u << 4;  // likewise

  std::uint64_t fields = kFeatures;
  std::uint64_t features = kTag | kWakeup;
  std::uint64_t unused[16]{};
};

/// ucp_worker_params_t
struct WorkerParams {
  static constexpr std::uint64_t kThreadMode = 1u << 0;
  static constexpr int kSerialized = 1;  // of `thread_mode`: one thread at a time

  std::uint64_t fields = kThreadMode;
  int thread_mode = kSerialized;
  int padding = 0;
  std::uint64_t unused[32]{};
};

/// ucp_ep_params_t
struct EndpointParams {
  static constexpr std::uint64_t kAddress = 1u << 0;
  static constexpr std::uint64_t kErrorMode = 1u << 1;
  static constexpr std::uint64_t kErrorHandler = 1u << 2;
  static constexpr int kPeer =
      1;  // of `error_mode`: a peer's death is an error, and not an abort()

  std::uint64_t fields = kAddress | kErrorMode | kErrorHandler;
  const void* address = nullptr;
  int error_mode = kPeer;
  int padding = 0;
  void (*on_error)(void* argument, Endpoint, Status) = nullptr;
  void* argument = nullptr;
  std::uint64_t unused[16]{};
};

/// ucp_transport_entry_t
struct TransportEntry {
  const char* name = nullptr;    // "rc_mlx5", "tcp"
  const char* device = nullptr;  // "mlx5_0:1", "eth0"
};

/// ucp_ep_attr_t
struct EndpointAttributes {
  static constexpr std::uint64_t kTransports = 1u << 3;

  std::uint64_t fields = kTransports;
  char name[32]{};
  std::uint64_t addresses[2][16]{};      // sockaddr_storage
  TransportEntry* transports = nullptr;  // room for `count`; UCX sets the actual count
  unsigned count = 0;
  int padding = 0;
  std::size_t transport_bytes = sizeof(TransportEntry);
  std::uint64_t unused[8]{};
};

/// ucp_request_param_t
struct RequestParams {
  static constexpr std::uint32_t kFlags = 1u << 4;
  static constexpr std::uint32_t kForce = 1u << 0;  // of `flags`, of ep_close

  std::uint32_t fields = 0;
  std::uint32_t flags = 0;
  std::uint64_t unused[16]{};
};

inline constexpr RequestParams kNoParams;

/// ucp_tag_recv_info_t
struct MessageInfo {
  std::uint64_t tag = 0;
  std::size_t bytes = 0;
};

/// The functions of a loaded library; UCX documents each.
struct Api {
  Symbols symbols;
  std::string path = symbols.path();  // of the library

  const char* (*version_string)() = symbols["ucp_get_version_string"];
  const char* (*status_string)(Status) = symbols["ucs_status_string"];
  Status (*config_read)(const char* prefix, const char* file, Config*) = symbols["ucp_config_read"];
  Status (*config_modify)(Config, const char* name,
                          const char* value) = symbols["ucp_config_modify"];
  void (*config_release)(Config) = symbols["ucp_config_release"];
  Status (*init)(unsigned major, unsigned minor, const Params*, Config,
                 Context*) = symbols["ucp_init_version"];
  void (*cleanup)(Context) = symbols["ucp_cleanup"];
  Status (*worker_create)(Context, const WorkerParams*,
                          WorkerHandle*) = symbols["ucp_worker_create"];
  void (*worker_destroy)(WorkerHandle) = symbols["ucp_worker_destroy"];
  Status (*worker_get_address)(WorkerHandle, void** address,
                               std::size_t* bytes) = symbols["ucp_worker_get_address"];
  void (*worker_release_address)(WorkerHandle,
                                 void* address) = symbols["ucp_worker_release_address"];
  Status (*worker_get_efd)(WorkerHandle, int*) = symbols["ucp_worker_get_efd"];
  Status (*worker_arm)(WorkerHandle) = symbols["ucp_worker_arm"];
  unsigned (*worker_progress)(WorkerHandle) = symbols["ucp_worker_progress"];
  Status (*ep_create)(WorkerHandle, const EndpointParams*, Endpoint*) = symbols["ucp_ep_create"];
  StatusPointer (*ep_close)(Endpoint, const RequestParams*) = symbols["ucp_ep_close_nbx"];
  Status (*ep_query)(Endpoint, EndpointAttributes*) = symbols["ucp_ep_query"];
  StatusPointer (*tag_send)(Endpoint, const void*, std::size_t bytes, std::uint64_t tag,
                            const RequestParams*) = symbols["ucp_tag_send_nbx"];
  Message (*tag_probe)(WorkerHandle, std::uint64_t tag, std::uint64_t mask, int remove,
                       MessageInfo*) = symbols["ucp_tag_probe_nb"];
  StatusPointer (*tag_message_receive)(WorkerHandle, void*, std::size_t bytes, Message,
                                       const RequestParams*) = symbols["ucp_tag_msg_recv_nbx"];
  Status (*request_check_status)(void*) = symbols["ucp_request_check_status"];
  void (*request_free)(void*) = symbols["ucp_request_free"];
  std::string version = version_string();  // "1.22.0"
};

}  // namespace torch_ring::ucx
