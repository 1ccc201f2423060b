// SPDX-License-Identifier: Apache-2.0
// Api: the part of NCCL's C interface that torch_ring uses, which RCCL has, too. The library is
// found at run time, so a build needs no CUDA. tests/device/nccl_check.cc compares these
// declarations with the real nccl.h, test_nccl_header.py has a table of versions.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "core/symbols.h"
#include "core/types.h"

namespace torch_ring::nccl {

/// Every other code is an error.
enum class Result : int { kSuccess = 0, kRemoteError = 6, kInProgress = 7 };

enum class DataType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
};

enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct UniqueId {
  char bytes[128];
};

/// ncclConfig_t as of NCCL 2.18.5. Newer versions only append fields, and read missing ones as
/// unset.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21805;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int unset = INT_MIN;  // padding; trafficClass in newer versions
};
static_assert(sizeof(Config) == 48);

struct OpaqueComm;
using Comm = OpaqueComm*;  // ncclComm_t

struct OpaqueStream;
using Stream = OpaqueStream*;  // cudaStream_t

/// The functions of a loaded library; NCCL documents each.
struct Api {
  Symbols symbols;
  int version;                        // 22703 is 2.27.3
  std::string path = symbols.path();  // of the library

  Result (*get_version)(int*) = symbols["ncclGetVersion"];
  Result (*get_unique_id)(UniqueId*) = symbols["ncclGetUniqueId"];
  const char* (*get_error_string)(Result) = symbols["ncclGetErrorString"];
  const char* (*get_last_error)(Comm) = symbols["ncclGetLastError"];
  Result (*comm_init_rank_config)(Comm*, int ranks, UniqueId, int rank,
                                  Config*) = symbols["ncclCommInitRankConfig"];
  Result (*comm_get_async_error)(Comm, Result*) = symbols["ncclCommGetAsyncError"];
  Result (*comm_destroy)(Comm) = symbols["ncclCommDestroy"];
  Result (*comm_abort)(Comm) = symbols["ncclCommAbort"];
  Result (*all_reduce)(const void*, void*, std::size_t count, DataType, RedOp, Comm,
                       Stream) = symbols["ncclAllReduce"];
  Result (*broadcast)(const void*, void*, std::size_t count, DataType, int root, Comm,
                      Stream) = symbols["ncclBroadcast"];
  Result (*reduce)(const void*, void*, std::size_t count, DataType, RedOp, int root, Comm,
                   Stream) = symbols["ncclReduce"];
  Result (*all_gather)(const void*, void*, std::size_t send_count, DataType, Comm,
                       Stream) = symbols["ncclAllGather"];
  Result (*reduce_scatter)(const void*, void*, std::size_t recv_count, DataType, RedOp, Comm,
                           Stream) = symbols["ncclReduceScatter"];
  Result (*send)(const void*, std::size_t count, DataType, int peer, Comm,
                 Stream) = symbols["ncclSend"];
  Result (*recv)(void*, std::size_t count, DataType, int peer, Comm, Stream) = symbols["ncclRecv"];
  Result (*group_start)() = symbols["ncclGroupStart"];
  Result (*group_end)() = symbols["ncclGroupEnd"];
};

/// NCCL's dtype for one of ours, or for its parts; bools are bytes of 0 and 1. NCCL has no int16.
constexpr DataType data_type_of(DType dtype) {
  switch (part_of(dtype)) {
    case DType::kInt8:
      return DataType::kInt8;
    case DType::kInt32:
      return DataType::kInt32;
    case DType::kInt64:
      return DataType::kInt64;
    case DType::kFloat16:
      return DataType::kFloat16;
    case DType::kBFloat16:
      return DataType::kBFloat16;
    case DType::kFloat32:
      return DataType::kFloat32;
    case DType::kFloat64:
      return DataType::kFloat64;
    default:
      return DataType::kUInt8;
  }
}

}  // namespace torch_ring::nccl
