#include "doubles/nccl_double.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/fd.h"
#include "core/reduce.h"
#include "doubles/opaque_stream.h"

using namespace torch_ring;
using namespace torch_ring::nccl;

namespace torch_ring::nccl {

namespace {

constexpr std::chrono::microseconds kPause{50};

std::atomic<int (*)()> current_gpu{[] { return 0; }};  // of the calling thread

/// A one-way ring buffer from one rank to another, with the bytes [read, written). Each counter has
/// one writer; its store releases the written bytes (or the free space) to the other rank.
struct Mailbox {
  static constexpr std::size_t kBytes = 256 << 10;
  std::atomic<std::size_t> written;
  std::atomic<std::size_t> read;
  std::byte bytes[kBytes];
};

/// The shared memory of the ranks of one unique id: a memfd, zero at first.
struct alignas(Mailbox) World {
  std::atomic<int> joined;

  /// size * size mailboxes after this struct, by sender and receiver.
  Mailbox* mail() { return reinterpret_cast<Mailbox*>(this + 1); }

  static std::size_t bytes(int size) {
    return sizeof(World) + static_cast<std::size_t>(size * size) * sizeof(Mailbox);
  }
};
static_assert(std::atomic<std::size_t>::is_always_lock_free);
static_assert(std::atomic<int>::is_always_lock_free);

}  // namespace

struct OpaqueComm {
  OpaqueComm(void* memory, int rank, int size)
      : world(static_cast<World*>(memory)), rank(rank), size(size) {}
  ~OpaqueComm() {
    munmap(world, World::bytes(size));
    ++nccl_double_faults()->freed;
  }

  Mailbox& mail(int from, int to) const { return world->mail()[from * size + to]; }

  World* const world;
  const int rank;
  const int size;
  int in_progress = 0;
  std::unique_ptr<Gpu::Operation> making;  // in progress; null if GPUs run all at once
  bool has_joined = false;
  bool finalized = false;
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
  std::vector<Transfer> transfers;
  std::function<void()> compute;
};

/// A thread's calls between ncclGroupStart and ncclGroupEnd, all of one communicator and stream.
struct Group {
  int depth = 0;
  std::vector<Call> calls;
};

/// This thread's group. Not thread_local: GCC 12's ThreadSanitizer sometimes fails to start a
/// thread while a library with such variables is loaded.
Group& my_group() {
  static std::mutex mutex;
  static std::map<std::thread::id, Group> groups;
  const std::scoped_lock lock(mutex);
  return groups[std::this_thread::get_id()];
}

std::atomic<std::int64_t> launches{0};

/// Runs the calls of the group as one.
Result launch() {
  const auto calls = std::make_shared<std::vector<Call>>(std::exchange(my_group().calls, {}));
  if (calls->empty()) return Result::kSuccess;
  const Comm comm = calls->front().comm;
  ++launches;
  ++comm->running;
  const Stream stream = calls->front().stream;
  std::shared_ptr<Gpu::Operation> operation;
  if (nccl_double_faults()->serial) operation = std::make_shared<Gpu::Operation>(stream->gpu);
  stream->enqueue([comm, calls, operation = std::move(operation)]() mutable {
    while (operation && !comm->aborted && !operation->is_next(kPause)) continue;
    std::vector<Transfer> transfers;
    for (const Call& call : *calls) {
      transfers.insert(transfers.end(), call.transfers.begin(), call.transfers.end());
    }
    if (transfer_all(*comm, transfers)) {
      for (const Call& call : *calls) call.compute();
    }
    operation.reset();
    --comm->running;
  });
  comm->in_progress = nccl_double_faults()->in_progress;
  return comm->in_progress > 0 ? Result::kInProgress : Result::kSuccess;
}

Result add(Call call) {
  Group& group = my_group();
  group.calls.push_back(std::move(call));
  return group.depth > 0 ? Result::kSuccess : launch();
}

DType dtype_of(DataType type) {
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    if (data_type_of(static_cast<DType>(dtype)) == type) return static_cast<DType>(dtype);
  }
  return DType::kUInt8;
}

Reduction reduction_of(DataType type, RedOp op) {
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin};
  return {dtype_of(type), kOps[static_cast<int>(op)], {}};
}

std::byte* at(const void* data, std::size_t offset = 0) {
  return static_cast<std::byte*>(const_cast<void*>(data)) + offset;
}

void copy(const void* from, void* to, std::size_t bytes) {
  if (bytes > 0 && from != to) std::memcpy(to, from, bytes);
}

/// A reduction for some ranks. Every rank sends `count` elements of its input, from element
/// `stride` * r on, to each rank r for which receives(r) holds. Those ranks reduce them in the
/// order of ranks, and round each partial result to the dtype, as NCCL does.
Result reduce_for(const std::function<bool(int)>& receives, std::size_t stride, const void* input,
                  void* output, std::size_t count, const Reduction& reduction, Comm comm,
                  Stream stream) {
  const std::size_t width = size_of(reduction.dtype);
  Call call{comm, stream, {}, [] {}};
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
  call.compute = [=] {
    std::vector<std::byte> result(count * width);  // the output may overlap the input
    copy(inputs[0], result.data(), result.size());
    for (std::size_t peer = 1; peer < inputs.size(); ++peer) {
      void* const into[] = {result.data()};
      const void* const two[] = {result.data(), inputs[peer]};
      reduce(into, two, count, reduction);
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

std::int64_t nccl_double_launches() { return launches; }

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
  return file < 0 ? static_cast<Result>(2) : Result::kSuccess;
}

const char* ncclGetErrorString(Result result) {
  return result == Result::kRemoteError ? "remote process exited" : "the double's error";
}
const char* ncclGetLastError(Comm) { return "as told"; }

Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, Config* config) {
  if (config->blocking != 0) return static_cast<Result>(4);
  const Fd file(open(id.bytes, O_RDWR | O_CLOEXEC));
  const std::size_t bytes = World::bytes(size);
  if (!file || ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return Result::kRemoteError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return static_cast<Result>(2);
  *comm = new OpaqueComm(memory, rank, size);
  if (nccl_double_faults()->serial) {
    (*comm)->making = std::make_unique<Gpu::Operation>(Gpu::of(current_gpu.load()()));
  }
  return Result::kInProgress;
}

Result ncclCommGetAsyncError(Comm comm, Result* state) {
  const NcclDoubleFaults& faults = *nccl_double_faults();
  *state = static_cast<Result>(faults.async_error.load());
  if (*state != Result::kSuccess) return Result::kSuccess;
  if (!comm->has_joined && (!comm->making || comm->making->is_next(kPause))) {
    comm->has_joined = true;
    ++comm->world->joined;
  }
  const bool is_made = comm->world->joined == comm->size && !faults.init_hangs;
  if (is_made) comm->making.reset();
  const bool incomplete = !is_made || (comm->finalized && comm->running > 0);
  if (incomplete || comm->in_progress-- > 0) *state = Result::kInProgress;
  return Result::kSuccess;
}

Result ncclCommFinalize(Comm comm) {
  hang_if_told();
  comm->finalized = true;
  return Result::kInProgress;
}

Result ncclCommDestroy(Comm comm) {
  hang_if_told();
  ++nccl_double_faults()->destroyed;
  delete comm;
  return Result::kSuccess;
}

Result ncclCommAbort(Comm comm) {
  ++nccl_double_faults()->aborted;
  hang_if_told();
  comm->aborted = true;
  while (comm->running > 0) std::this_thread::sleep_for(kPause);
  delete comm;
  return Result::kSuccess;
}

Result ncclAllReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                     Comm comm, Stream stream) {
  const auto all = [](int) { return true; };
  return reduce_for(all, 0, input, output, count, reduction_of(type, op), comm, stream);
}

Result ncclReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                  int root, Comm comm, Stream stream) {
  const auto alone = [=](int rank) { return rank == root; };
  return reduce_for(alone, 0, input, output, count, reduction_of(type, op), comm, stream);
}

Result ncclReduceScatter(const void* input, void* output, std::size_t count, DataType type,
                         RedOp op, Comm comm, Stream stream) {
  const auto all = [](int) { return true; };
  return reduce_for(all, count, input, output, count, reduction_of(type, op), comm, stream);
}

Result ncclBroadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                     Comm comm, Stream stream) {
  const std::size_t bytes = count * size_of(dtype_of(type));
  if (comm->rank != root) return add({comm, stream, {{root, false, at(output), bytes}}, [] {}});
  Call call{comm, stream, {}, [=] { copy(input, output, bytes); }};
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer != root) call.transfers.push_back({peer, true, at(input), bytes});
  }
  return add(std::move(call));
}

Result ncclAllGather(const void* input, void* output, std::size_t count, DataType type, Comm comm,
                     Stream stream) {
  const std::size_t bytes = count * size_of(dtype_of(type));
  const auto place = [=](int rank) { return at(output, static_cast<std::size_t>(rank) * bytes); };
  Call call{comm, stream, {}, [=] { copy(input, place(comm->rank), bytes); }};
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    call.transfers.push_back({peer, true, at(input), bytes});
    call.transfers.push_back({peer, false, place(peer), bytes});
  }
  return add(std::move(call));
}

Result ncclSend(const void* data, std::size_t count, DataType type, int peer, Comm comm,
                Stream stream) {
  return add({comm, stream, {{peer, true, at(data), count * size_of(dtype_of(type))}}, [] {}});
}

Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream) {
  return add({comm, stream, {{peer, false, at(data), count * size_of(dtype_of(type))}}, [] {}});
}

Result ncclGroupStart() {
  ++my_group().depth;
  return Result::kSuccess;
}

Result ncclGroupEnd() { return --my_group().depth > 0 ? Result::kSuccess : launch(); }
}
