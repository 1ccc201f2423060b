// SPDX-License-Identifier: Apache-2.0
#include "doubles/nccl_double.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/fd.h"
#include "core/half.h"
#include "core/reduce.h"
#include "doubles/opaque_stream.h"

using namespace torch_ring;
using namespace torch_ring::nccl;

namespace torch_ring::nccl {

namespace {

constexpr std::chrono::microseconds kPause{50};
constexpr int kMostRanks = 32;

constexpr auto kDeviceError = static_cast<Result>(1);
constexpr auto kSystemError = static_cast<Result>(2);
constexpr auto kInvalidArgument = static_cast<Result>(4);
constexpr auto kInvalidUsage = static_cast<Result>(5);

std::atomic<int (*)()> current_gpu{[] { return 0; }};  // of the calling thread

/// The calls whose first use connects all ranks.
enum Collective { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kCollectives };

/// A one-way ring buffer from one rank to another, with the bytes [read, written). Each counter has
/// one writer; its store releases the written bytes (or the free space) to the other rank.
struct Mailbox {
  static constexpr std::size_t kBytes = 256 << 10;
  std::atomic<std::size_t> written;
  std::atomic<std::size_t> read;
  std::atomic<bool> connected[2];  // by the receiver, by the sender
  std::byte bytes[kBytes];
};

/// A rank's identity, which it writes before it joins.
struct Peer {
  std::size_t host;  // a hash
  std::size_t gpu;   // its number on that host
};

/// The shared memory of the ranks of one unique id: a memfd, zero at first. From its joining to its
/// end a rank locks its byte of the file, which its death unlocks, too.
struct alignas(Mailbox) World {
  std::atomic<int> joined;
  std::atomic<int> connected[kCollectives];
  Peer peers[kMostRanks];

  /// size * size mailboxes after this struct, by sender and receiver.
  Mailbox* mail() { return reinterpret_cast<Mailbox*>(this + 1); }

  static std::size_t bytes(int size) {
    return sizeof(World) + static_cast<std::size_t>(size * size) * sizeof(Mailbox);
  }
};
static_assert(std::atomic<std::size_t>::is_always_lock_free);
static_assert(std::atomic<int>::is_always_lock_free);

/// The host, as NCCL tells it: by NCCL_HOSTID, if that is set. The GPU: each process sees GPUs of
/// its own, as jobs of some launchers do, unless NCCL_DOUBLE_SHARED_GPUS is set.
Peer myself() {
  const char* host = std::getenv("NCCL_HOSTID");
  const auto gpu = static_cast<std::size_t>(current_gpu.load()());
  const bool shared = std::getenv("NCCL_DOUBLE_SHARED_GPUS") != nullptr;
  return {std::hash<std::string_view>()(host ? host : ""),
          shared ? gpu : static_cast<std::size_t>(getpid()) << 8 | gpu};
}

/// How often this thread has slept.
std::int64_t sleeps_of_thread() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

}  // namespace

/// A communicator. Since NCCL 2.23 each call, or group of calls, on a communicator that does not
/// block is launched by a thread of its own. Until ncclCommGetAsyncError has told its success,
/// other calls are refused.
struct OpaqueComm {
  OpaqueComm(Fd file, void* memory, int rank, int size)
      : file(std::move(file)),
        world(static_cast<World*>(memory)),
        rank(rank),
        size(size),
        gpu(current_gpu.load()()) {}
  ~OpaqueComm() {
    munmap(world, World::bytes(size));
    ++nccl_double_faults()->freed;
  }

  Mailbox& mail(int from, int to) const { return world->mail()[from * size + to]; }

  /// The error of a call that must not be made now, or on this thread.
  Result refusal() const {
    const int here = current_gpu.load()();
    if (here < 0) return kDeviceError;
    if (launch || result != Result::kSuccess) return kInvalidArgument;
    return here == gpu ? Result::kSuccess : kInvalidUsage;
  }

  /// Runs `function` in a thread; its result is that of the call.
  Result start(std::function<Result()> function) {
    ++nccl_double_counts()->threads;
    launch.emplace(std::async(std::launch::async, std::move(function)));
    in_progress = nccl_double_faults()->in_progress;
    caller = std::this_thread::get_id();
    slept = sleeps_of_thread();
    return Result::kInProgress;
  }

  Result poll() {
    if (!launch) return result;
    ++nccl_double_counts()->polls;
    if (caller == std::this_thread::get_id()) {
      nccl_double_counts()->sleeps += sleeps_of_thread() - slept;
    }
    const bool is_over = launch->wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    if (is_over && in_progress-- <= 0) {
      result = launch->get();
      launch.reset();
      return result;
    }
    slept = sleeps_of_thread();
    return Result::kInProgress;
  }

  /// Waits for `condition`; returns false if the communicator is aborted before.
  bool wait(const std::function<bool()>& condition) const {
    while (!condition()) {
      if (aborted) return false;
      std::this_thread::sleep_for(kPause);
    }
    return true;
  }

  bool lock(int type) const {
    struct flock byte{};
    byte.l_type = static_cast<short>(type);
    byte.l_start = rank;
    byte.l_len = 1;
    return fcntl(file.get(), F_OFD_SETLK, &byte) == 0;
  }

  /// Whether the other rank of this host has not ended its communicator, and lives.
  bool is_there(int other) const {
    if (other == rank || world->peers[other].host != world->peers[rank].host) return false;
    struct flock byte{};
    byte.l_type = F_WRLCK;
    byte.l_start = other;
    byte.l_len = 1;
    return fcntl(file.get(), F_OFD_GETLK, &byte) == 0 && byte.l_type != F_UNLCK;
  }

  /// This rank ends its communicator: the others of its host need not wait for it any more.
  /// Returns whether all of them have ended theirs.
  bool others_have_ended() {
    lock(F_UNLCK);
    for (int other = 0; other < size; ++other) {
      if (is_there(other)) return false;
    }
    return true;
  }

  const Fd file;
  World* const world;
  const int rank;
  const int size;
  const int gpu;
  std::optional<std::future<Result>> launch;  // in progress
  Result result = Result::kSuccess;           // of the last launch
  int in_progress = 0;                        // see NcclDoubleFaults
  std::thread::id caller;                     // it made the last call,
  std::int64_t slept = 0;                     // and had slept so often
  bool connected[kCollectives]{};             // collectives that this rank has used
  std::string problem;                        // of a launch that failed
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};
};

namespace {

/// The rest of a transfer to or from a peer.
struct Transfer {
  int peer;
  bool sends;
  std::byte* data;
  std::size_t bytes;
};

std::byte* at(const void* data, std::size_t offset = 0) {
  return static_cast<std::byte*>(const_cast<void*>(data)) + offset;
}

/// Moves the bytes that fit or have arrived; returns whether there were any.
bool advance(const OpaqueComm& self, Transfer& transfer) {
  Mailbox& mail =
      transfer.sends ? self.mail(self.rank, transfer.peer) : self.mail(transfer.peer, self.rank);
  const std::size_t full = mail.written.load() - mail.read.load();
  std::atomic<std::size_t>& position = transfer.sends ? mail.written : mail.read;
  const std::size_t start = position.load() % Mailbox::kBytes;
  const std::size_t bytes = std::min(
      {transfer.bytes, Mailbox::kBytes - start, transfer.sends ? Mailbox::kBytes - full : full});
  if (bytes == 0) return false;
  std::byte* const there = mail.bytes + start;
  std::memcpy(transfer.sends ? there : transfer.data, transfer.sends ? transfer.data : there,
              bytes);
  transfer.data += bytes;
  transfer.bytes -= bytes;
  position += bytes;
  return true;
}

/// Runs all transfers concurrently; those to or from one peer stay in order. Returns false if the
/// communicator is aborted before they are done.
bool transfer_all(const OpaqueComm& self, std::span<Transfer> transfers) {
  while (!self.aborted) {
    bool moved = false;
    std::set<std::pair<bool, int>> busy;
    for (Transfer& transfer : transfers) {
      const std::pair way{transfer.sends, transfer.peer};
      if (transfer.bytes == 0 || busy.contains(way)) continue;
      moved |= advance(self, transfer);
      if (transfer.bytes > 0) busy.insert(way);
    }
    if (busy.empty() && !nccl_double_faults()->hang) return true;
    if (!moved) std::this_thread::sleep_for(kPause);
  }
  return false;
}

/// A call: its transfers, and the computation after they are done.
struct Call {
  Comm comm;
  Stream stream;
  std::optional<Collective> collective;
  std::vector<Transfer> transfers;
  std::function<void()> compute;
};

/// A thread's calls between ncclGroupStart and ncclGroupEnd, all of one communicator and stream.
struct Group {
  int depth = 0;
  std::vector<Call> calls;
  Result refused = Result::kSuccess;  // the error of a call in it
};

/// This thread's group. Not thread_local: GCC 12's ThreadSanitizer sometimes fails to start a
/// thread while a library with such variables is loaded.
Group& my_group() {
  static std::mutex mutex;
  static std::map<std::thread::id, Group> groups;
  const std::scoped_lock lock(mutex);
  return groups[std::this_thread::get_id()];
}

/// Connects the ranks for the calls of a group: all ranks for the first collective of a kind, two
/// of them for the first message between them. Returns false if the communicator is aborted before.
bool connect(OpaqueComm& self, const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    if (!call.collective) {
      for (const Transfer& transfer : call.transfers) {
        (transfer.sends ? self.mail(self.rank, transfer.peer) : self.mail(transfer.peer, self.rank))
            .connected[transfer.sends] = true;
      }
    } else if (!std::exchange(self.connected[*call.collective], true)) {
      ++self.world->connected[*call.collective];
    }
  }
  return self.wait([&] {
    return std::ranges::all_of(calls, [&](const Call& call) {
      if (call.collective) return self.world->connected[*call.collective] == self.size;
      return std::ranges::all_of(call.transfers, [&](const Transfer& transfer) {
        return transfer.sends ? self.mail(self.rank, transfer.peer).connected[0].load()
                              : self.mail(transfer.peer, self.rank).connected[1].load();
      });
    });
  });
}

/// Runs the calls of the group as one, if all of them are allowed.
Result launch() {
  const auto calls = std::make_shared<std::vector<Call>>(std::exchange(my_group().calls, {}));
  if (const Result refused = std::exchange(my_group().refused, Result::kSuccess);
      refused != Result::kSuccess) {
    return refused;
  }
  if (calls->empty()) return Result::kSuccess;
  const Comm comm = calls->front().comm;
  if (const Result refused = comm->refusal(); refused != Result::kSuccess) return refused;
  ++nccl_double_counts()->launches;
  ++comm->running;
  return comm->start([comm, stream = calls->front().stream, calls] {
    if (!connect(*comm, *calls)) {
      --comm->running;
      return Result::kSuccess;
    }
    std::shared_ptr<Gpu::Operation> operation;
    if (nccl_double_faults()->serial) operation = std::make_shared<Gpu::Operation>(stream->gpu);
    stream->enqueue([comm, calls, operation = std::move(operation)]() mutable {
      while (operation && !comm->aborted && !operation->is_next(kPause)) continue;
      // Ranks that transfer something first tell each other the sizes of their groups.
      const auto size = std::ranges::count_if(*calls, [](auto& call) { return !!call.collective; });
      std::map<std::pair<bool, int>, std::ptrdiff_t> sizes;  // by way and peer
      for (const Call& call : *calls) {
        for (const Transfer& transfer : call.transfers) {
          if (call.collective) sizes[{transfer.sends, transfer.peer}] = size;
        }
      }
      std::vector<Transfer> first;
      for (auto& [way, told] : sizes) {
        first.push_back({way.second, way.first, at(&told), sizeof told});
      }
      std::vector<Transfer> transfers;
      for (const Call& call : *calls) {
        transfers.insert(transfers.end(), call.transfers.begin(), call.transfers.end());
      }
      const bool is_told = transfer_all(*comm, first);
      if (std::ranges::any_of(sizes, [&](auto& each) { return each.second != size; })) {
        ++nccl_double_counts()->misgrouped;
        comm->wait([] { return false; });
      } else if (is_told && transfer_all(*comm, transfers)) {
        for (const Call& call : *calls) call.compute();
      }
      operation.reset();
      --comm->running;
    });
    return Result::kSuccess;
  });
}

Result add(Call call) {
  Group& group = my_group();
  const Comm comm = call.comm;
  Result refused = comm->refusal();
  if (refused == Result::kSuccess && call.stream->gpu.number != comm->gpu) refused = kInvalidUsage;
  if (refused != Result::kSuccess) group.refused = refused;
  group.calls.push_back(std::move(call));
  return group.depth > 0 ? refused : launch();
}

DType dtype_of(DataType type) {
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    if (data_type_of(static_cast<DType>(dtype)) == type) return static_cast<DType>(dtype);
  }
  return DType::kUInt8;
}

/// An Average multiplies the inputs by 1/n, rounded to the dtype.
Reduction reduction_of(DataType type, RedOp op, Comm comm) {
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin,
                               ReduceOp::kSum};
  Reduction reduction{dtype_of(type), kOps[static_cast<int>(op)], {}};
  if (op != RedOp::kAvg) return reduction;
  const double exact = 1.0 / comm->size;
  const auto rounded = static_cast<float>(exact);
  double& factor = reduction.scaling.prescale;
  switch (reduction.dtype) {
    case DType::kFloat16:
      factor = to_float(to_float16(rounded));
      break;
    case DType::kBFloat16:
      factor = to_float(to_bfloat16(rounded));
      break;
    case DType::kFloat32:
      factor = rounded;
      break;
    default:  // NCCL's average of integers divides the sum, which nobody calls
      factor = exact;
  }
  return reduction;
}

void copy(const void* from, void* to, std::size_t bytes) {
  if (bytes > 0 && from != to) std::memcpy(to, from, bytes);
}

/// A reduction for some ranks. Every rank sends `count` elements of its input, from element
/// `stride` * r on, to each rank r for which receives(r) holds. Those ranks reduce them in the
/// order of ranks, beginning with another rank for each size, and round each scaled input and each
/// partial result to the dtype, as NCCL does.
Result reduce_for(Collective collective, const std::function<bool(int)>& receives,
                  std::size_t stride, const void* input, void* output, std::size_t count,
                  const Reduction& reduction, Comm comm, Stream stream) {
  const std::size_t width = size_of(reduction.dtype);
  Call call{comm, stream, collective, {}, [] {}};
  for (int peer = 0; peer < comm->size; ++peer) {
    const std::size_t start = static_cast<std::size_t>(peer) * stride * width;
    if (peer != comm->rank && receives(peer)) {
      call.transfers.push_back({peer, true, at(input, start), count * width});
    }
  }
  if (!receives(comm->rank)) return add(std::move(call));

  const auto arrived = std::make_shared<std::vector<std::vector<std::byte>>>();
  std::vector<const void*> inputs;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) {
      inputs.push_back(at(input, static_cast<std::size_t>(peer) * stride * width));
    } else {
      std::byte* const data = arrived->emplace_back(count * width).data();
      call.transfers.push_back({peer, false, data, count * width});
      inputs.push_back(data);
    }
  }
  std::ranges::rotate(inputs, inputs.begin() + static_cast<std::ptrdiff_t>(count % inputs.size()));
  call.compute = [=] {
    std::vector<std::byte> result(count * width);  // the output may overlap the input
    std::vector<std::byte> input(count * width);
    for (std::size_t peer = 0; peer < inputs.size(); ++peer) {
      void* const into[] = {peer == 0 ? result.data() : input.data()};
      reduce(into, {&inputs[peer], 1}, count, reduction);
      if (peer == 0) continue;
      void* const sum[] = {result.data()};
      const void* const two[] = {result.data(), input.data()};
      reduce(sum, two, count, {reduction.dtype, reduction.op, {}});
    }
    copy(result.data(), output, result.size());
    arrived->clear();
  };
  return add(std::move(call));
}

void hang_if_told() {
  while (nccl_double_faults()->end_hangs) std::this_thread::sleep_for(kPause);
}

}  // namespace
}  // namespace torch_ring::nccl

extern "C" {

void nccl_double_tell_gpu(int (*current)()) { current_gpu = current; }

NcclDoubleFaults* nccl_double_faults() {
  static NcclDoubleFaults faults;
  return &faults;
}

NcclDoubleCounts* nccl_double_counts() {
  static NcclDoubleCounts counts;
  return &counts;
}

Result ncclGetVersion(int* version) {
  *version = nccl_double_faults()->version;
  return Result::kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  // Other ranks may join at any time, but only the last few worlds: older memory is freed.
  constexpr std::size_t kOpen = 32;
  static std::mutex mutex;
  static std::deque<Fd> files;
  const std::scoped_lock lock(mutex);
  files.emplace_back(memfd_create("nccl_double", MFD_CLOEXEC));
  if (files.size() > kOpen) files.pop_front();
  const int file = files.back().get();
  std::snprintf(id->bytes, sizeof id->bytes, "/proc/%d/fd/%d", getpid(), file);
  return file < 0 ? kSystemError : Result::kSuccess;
}

const char* ncclGetErrorString(Result result) {
  if (result == kInvalidUsage) return "invalid usage";
  return result == Result::kRemoteError ? "remote process exited" : "the double's error";
}
const char* ncclGetLastError(Comm comm) {
  return comm && !comm->problem.empty() ? comm->problem.c_str() : "as told";
}

Result ncclCommInitRankConfig(Comm* made, int size, UniqueId id, int rank, Config* config) {
  if (config->blocking != 0 || size > kMostRanks) return kInvalidArgument;
  Fd file(open(id.bytes, O_RDWR | O_CLOEXEC));
  const std::size_t bytes = World::bytes(size);
  if (!file || ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return Result::kRemoteError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return kSystemError;
  const auto comm = *made = new OpaqueComm(std::move(file), memory, rank, size);
  std::shared_ptr<Gpu::Operation> operation;
  if (nccl_double_faults()->serial)
    operation = std::make_shared<Gpu::Operation>(Gpu::of(comm->gpu));
  return comm->start([comm, here = myself(), operation = std::move(operation)] {
    World& world = *comm->world;
    if (!comm->wait([&] { return !operation || operation->is_next(kPause); })) return kSystemError;
    world.peers[comm->rank] = here;
    comm->lock(F_WRLCK);
    ++world.joined;
    const auto all_are_here = [&] {
      return world.joined == comm->size && !nccl_double_faults()->init_hangs;
    };
    if (!comm->wait(all_are_here)) return kSystemError;
    for (int other = 0; other < comm->size; ++other) {
      const Peer& peer = world.peers[other];
      if (other == comm->rank || peer.host != here.host || peer.gpu != here.gpu) continue;
      comm->problem = "Duplicate GPU detected : rank " + std::to_string(comm->rank) + " and rank " +
                      std::to_string(other) + " both on CUDA device " + std::to_string(peer.gpu);
      return kInvalidUsage;
    }
    return Result::kSuccess;
  });
}

Result ncclCommGetAsyncError(Comm comm, Result* state) {
  *state = static_cast<Result>(nccl_double_faults()->async_error.load());
  if (*state == Result::kSuccess) *state = comm->poll();
  return Result::kSuccess;
}

Result ncclCommDestroy(Comm comm) {
  hang_if_told();
  if (const Result refused = comm->refusal(); refused != Result::kSuccess) return refused;
  comm->wait([&] { return comm->running == 0 && comm->others_have_ended(); });
  ++nccl_double_faults()->destroyed;
  delete comm;
  return Result::kSuccess;
}

Result ncclCommAbort(Comm comm) {
  ++nccl_double_faults()->aborted;
  hang_if_told();
  comm->aborted = true;
  if (comm->launch) comm->launch->wait();
  while (comm->running > 0 || !comm->others_have_ended()) std::this_thread::sleep_for(kPause);
  delete comm;
  return Result::kSuccess;
}

Result ncclAllReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                     Comm comm, Stream stream) {
  const auto all = [](int) { return true; };
  return reduce_for(kAllReduce, all, 0, input, output, count, reduction_of(type, op, comm), comm,
                    stream);
}

Result ncclReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                  int root, Comm comm, Stream stream) {
  const auto alone = [=](int rank) { return rank == root; };
  return reduce_for(kReduce, alone, 0, input, output, count, reduction_of(type, op, comm), comm,
                    stream);
}

Result ncclReduceScatter(const void* input, void* output, std::size_t count, DataType type,
                         RedOp op, Comm comm, Stream stream) {
  const auto all = [](int) { return true; };
  return reduce_for(kReduceScatter, all, count, input, output, count, reduction_of(type, op, comm),
                    comm, stream);
}

Result ncclBroadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                     Comm comm, Stream stream) {
  const std::size_t bytes = count * size_of(dtype_of(type));
  if (comm->rank != root) {
    return add({comm, stream, kBroadcast, {{root, false, at(output), bytes}}, [] {}});
  }
  Call call{comm, stream, kBroadcast, {}, [=] { copy(input, output, bytes); }};
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer != root) call.transfers.push_back({peer, true, at(input), bytes});
  }
  return add(std::move(call));
}

Result ncclAllGather(const void* input, void* output, std::size_t count, DataType type, Comm comm,
                     Stream stream) {
  const std::size_t bytes = count * size_of(dtype_of(type));
  const auto place = [=](int rank) { return at(output, static_cast<std::size_t>(rank) * bytes); };
  Call call{comm, stream, kAllGather, {}, [=] { copy(input, place(comm->rank), bytes); }};
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    call.transfers.push_back({peer, true, at(input), bytes});
    call.transfers.push_back({peer, false, place(peer), bytes});
  }
  return add(std::move(call));
}

Result ncclSend(const void* data, std::size_t count, DataType type, int peer, Comm comm,
                Stream stream) {
  return add({comm, stream, {}, {{peer, true, at(data), count * size_of(dtype_of(type))}}, [] {}});
}

Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream) {
  return add({comm, stream, {}, {{peer, false, at(data), count * size_of(dtype_of(type))}}, [] {}});
}

Result ncclGroupStart() {
  ++my_group().depth;
  return Result::kSuccess;
}

Result ncclGroupEnd() { return --my_group().depth > 0 ? Result::kSuccess : launch(); }
}
