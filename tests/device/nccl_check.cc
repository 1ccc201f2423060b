// SPDX-License-Identifier: Apache-2.0
// Holds csrc/nccl against the real nccl.h and the real library. Usage: nccl_check libnccl.so.2
// test_nccl_header.py compiles and runs it where torch has brought NCCL along.
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <type_traits>

#include "nccl/loader.h"

namespace ours = torch_ring::nccl;

template <class Ours, class Theirs>
constexpr bool same(Ours a, Theirs b) {
  return static_cast<int>(a) == static_cast<int>(b);
}

static_assert(same(ours::Result::kSuccess, ncclSuccess));
static_assert(same(ours::Result::kRemoteError, ncclRemoteError));
static_assert(same(ours::Result::kInProgress, ncclInProgress));
static_assert(same(ours::DataType::kInt8, ncclInt8) && same(ours::DataType::kUInt8, ncclUint8));
static_assert(same(ours::DataType::kInt32, ncclInt32) && same(ours::DataType::kInt64, ncclInt64));
static_assert(same(ours::DataType::kFloat16, ncclFloat16));
static_assert(same(ours::DataType::kBFloat16, ncclBfloat16));
static_assert(same(ours::DataType::kFloat32, ncclFloat32));
static_assert(same(ours::DataType::kFloat64, ncclFloat64));
static_assert(same(ours::RedOp::kSum, ncclSum) && same(ours::RedOp::kProd, ncclProd));
static_assert(same(ours::RedOp::kMax, ncclMax) && same(ours::RedOp::kMin, ncclMin));
static_assert(same(ours::RedOp::kAvg, ncclAvg));
static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(ours::Result) == sizeof(ncclResult_t));
static_assert(sizeof(ours::DataType) == sizeof(ncclDataType_t));
static_assert(sizeof(ours::Config) <= sizeof(ncclConfig_t));
#define SAME_PLACE(ours_field, field) \
  static_assert(offsetof(ours::Config, ours_field) == offsetof(ncclConfig_t, field))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
SAME_PLACE(unset, trafficClass);

/// Whether two functions take arguments of the same kinds: enums and pointers are ours or NCCL's.
template <class A, class B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                        std::is_class_v<A> == std::is_class_v<B>;
template <class A, class B>
struct Alike;
template <class A, class... As, class B, class... Bs>
struct Alike<A (*)(As...), B (*)(Bs...)> {
  static constexpr bool check() {
    if constexpr (sizeof...(As) == sizeof...(Bs)) {
      return kAlike<A, B> && (kAlike<As, Bs> && ...);
    } else {
      return false;
    }
  }
};
#define SAME_ARGUMENTS(member, function) \
  static_assert(Alike<decltype(ours::Api::member), decltype(&function)>::check())
SAME_ARGUMENTS(get_version, ncclGetVersion);
SAME_ARGUMENTS(get_unique_id, ncclGetUniqueId);
SAME_ARGUMENTS(get_error_string, ncclGetErrorString);
SAME_ARGUMENTS(get_last_error, ncclGetLastError);
SAME_ARGUMENTS(comm_init_rank_config, ncclCommInitRankConfig);
SAME_ARGUMENTS(comm_get_async_error, ncclCommGetAsyncError);
SAME_ARGUMENTS(comm_destroy, ncclCommDestroy);
SAME_ARGUMENTS(comm_abort, ncclCommAbort);
SAME_ARGUMENTS(all_reduce, ncclAllReduce);
SAME_ARGUMENTS(broadcast, ncclBroadcast);
SAME_ARGUMENTS(reduce, ncclReduce);
SAME_ARGUMENTS(all_gather, ncclAllGather);
SAME_ARGUMENTS(reduce_scatter, ncclReduceScatter);
SAME_ARGUMENTS(send, ncclSend);
SAME_ARGUMENTS(recv, ncclRecv);
SAME_ARGUMENTS(group_start, ncclGroupStart);
SAME_ARGUMENTS(group_end, ncclGroupEnd);

int main(int, char** argv) {
  const ours::Api api = ours::load(argv[1]);
  ours::UniqueId id{};
  if (api.get_unique_id(&id) != ours::Result::kSuccess) return 1;
  if (std::all_of(std::begin(id.bytes), std::end(id.bytes), [](char c) { return c == 0; }))
    return 2;
  std::printf("%s %d\n", ours::version_text(api.version).c_str(), NCCL_VERSION_CODE - api.version);
}
