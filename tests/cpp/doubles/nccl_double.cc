#include "doubles/nccl_double.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/reduce.h"

using namespace torch_ring;
using namespace torch_ring::nccl;

namespace torch_ring::nccl {

struct OpaqueStream {
  OpaqueStream() : thread([this] { run(); }) {}
  ~OpaqueStream() {
    enqueue(nullptr);
    thread.join();
  }

  void enqueue(std::function<void()> task) {
    const std::scoped_lock lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }

  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return tasks.empty(); });
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return !tasks.empty(); });
      const auto task = tasks.front();  // stays there until it is done
      if (!task) return;
      lock.unlock();
      task();
      lock.lock();
      tasks.pop_front();
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::thread thread;
};

namespace {

/// What one rank brings to a collective.
struct Part {
  const void* input;
  void* output;
};

/// The ranks that share a unique id.
struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0;
  int joined = 0;
  std::map<long, std::vector<Part>> rounds;  // by number, those who have come
  std::map<long, int> left;                  // by number, how many have read the result
  std::map<std::pair<int, int>, std::deque<const void*>> mail;  // by sender and receiver
  std::map<std::pair<int, int>, long> taken;
};

std::mutex registry_mutex;
std::map<std::string, std::weak_ptr<Group>> registry;

}  // namespace

struct OpaqueComm {
  std::shared_ptr<Group> group;
  int rank = 0;
  int in_progress = 0;
  long round = 0;
  std::map<std::pair<int, int>, long> sent;
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};
};

namespace {

/// What a call does on its stream.
using Task = std::function<void(OpaqueComm&)>;
struct Note {
  Comm comm;
  Stream stream;
  Task post;  // what others may wait for, first
  Task wait;
};
thread_local int group_depth = 0;
thread_local std::vector<Note> notes;

Result answer(Comm comm) {
  comm->in_progress = nccl_double_faults()->in_progress;
  return comm->in_progress > 0 ? Result::kInProgress : Result::kSuccess;
}

Result launch() {
  std::vector<Note> all;
  std::swap(all, notes);
  if (all.empty()) return Result::kSuccess;
  const Comm comm = all[0].comm;
  ++comm->running;
  all[0].stream->enqueue([all] {
    OpaqueComm& self = *all[0].comm;
    for (const Note& note : all) {
      if (note.post) note.post(self);
    }
    for (const bool sends : {false, true}) {  // a send is over when its receiver has come so far
      for (const Note& note : all) {
        if (static_cast<bool>(note.post) == sends) note.wait(self);
      }
    }
    const std::scoped_lock lock(self.group->mutex);
    --self.running;
    self.group->changed.notify_all();
  });
  return answer(comm);
}

Result note(Note call) {
  notes.push_back(std::move(call));
  return group_depth > 0 ? Result::kSuccess : launch();
}

/// Waits for all ranks; the last one computes for all.
Result together(Comm comm, Stream stream, Part part,
                std::function<void(const std::vector<Part>&)> compute) {
  const long number = comm->round++;
  return note({comm, stream, nullptr, [=](OpaqueComm& self) {
                 Group& group = *self.group;
                 std::unique_lock lock(group.mutex);
                 auto& parts = group.rounds[number];
                 parts.resize(static_cast<std::size_t>(group.size));
                 parts[static_cast<std::size_t>(self.rank)] = part;
                 if (++group.left[number] == group.size) {
                   compute(parts);
                   group.left[number] = 1000;  // done
                   group.changed.notify_all();
                 }
                 group.changed.wait(lock,
                                    [&] { return group.left[number] >= 1000 || self.aborted; });
               }});
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

/// outputs = the reduction of the inputs from an offset on.
void reduce_parts(const std::vector<Part>& parts, std::vector<void*> outputs, std::size_t offset,
                  std::size_t count, const Reduction& reduction) {
  std::vector<const void*> inputs;
  std::vector<std::byte> result(count * size_of(reduction.dtype));
  for (const Part& part : parts)
    inputs.push_back(static_cast<const std::byte*>(part.input) + offset);
  void* const into[] = {result.data()};
  reduce(into, inputs, count, reduction);
  for (void* output : outputs)
    std::copy(result.begin(), result.end(), static_cast<std::byte*>(output));
}

}  // namespace
}  // namespace torch_ring::nccl

extern "C" {

NcclDoubleFaults* nccl_double_faults() {
  static NcclDoubleFaults faults;
  return &faults;
}

Stream nccl_double_stream_create() { return new OpaqueStream; }
void nccl_double_stream_synchronize(Stream stream) { stream->synchronize(); }
void nccl_double_stream_destroy(Stream stream) { delete stream; }
void nccl_double_stream_enqueue(Stream stream, void (*fn)(void*), void* argument) {
  stream->enqueue([=] { fn(argument); });
}

Result ncclGetVersion(int* version) {
  *version = nccl_double_faults()->version;
  return Result::kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> count{0};
  std::snprintf(id->bytes, sizeof id->bytes, "double %d", ++count);
  return Result::kSuccess;
}

const char* ncclGetErrorString(Result result) {
  return result == Result::kRemoteError ? "remote process exited" : "the double's error";
}
const char* ncclGetLastError(Comm) { return "as told"; }

Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, Config* config) {
  if (config->blocking != 0) return static_cast<Result>(4);
  *comm = new OpaqueComm;
  const std::scoped_lock lock(registry_mutex);
  std::weak_ptr<Group>& known = registry[id.bytes];
  (*comm)->group = known.lock();
  if (!(*comm)->group) known = (*comm)->group = std::make_shared<Group>();
  Group& group = *(*comm)->group;
  const std::scoped_lock group_lock(group.mutex);
  group.size = size;
  ++group.joined;
  (*comm)->rank = rank;
  return Result::kInProgress;
}

Result ncclCommGetAsyncError(Comm comm, Result* state) {
  const NcclDoubleFaults& faults = *nccl_double_faults();
  const std::scoped_lock lock(comm->group->mutex);
  *state = static_cast<Result>(faults.async_error.load());
  if (*state != Result::kSuccess) return Result::kSuccess;
  const bool incomplete = comm->group->joined < comm->group->size || faults.init_hangs;
  if (incomplete || comm->in_progress-- > 0) *state = Result::kInProgress;
  return Result::kSuccess;
}

Result ncclCommFinalize(Comm comm) {
  std::unique_lock lock(comm->group->mutex);
  if (comm->running == 0) return Result::kSuccess;
  comm->in_progress = 1000;
  return Result::kInProgress;
}

Result ncclCommDestroy(Comm comm) {
  ++nccl_double_faults()->destroyed;
  delete comm;
  return Result::kSuccess;
}

Result ncclCommAbort(Comm comm) {
  ++nccl_double_faults()->aborted;
  {
    std::unique_lock lock(comm->group->mutex);
    comm->aborted = true;
    comm->group->changed.notify_all();
    comm->group->changed.wait(lock, [&] { return comm->running == 0; });
  }
  delete comm;
  return Result::kSuccess;
}

Result ncclAllReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                     Comm comm, Stream stream) {
  return together(comm, stream, {input, output}, [=](const std::vector<Part>& parts) {
    std::vector<void*> outputs;
    for (const Part& part : parts) outputs.push_back(part.output);
    reduce_parts(parts, outputs, 0, count, reduction_of(type, op));
  });
}

Result ncclReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                  int root, Comm comm, Stream stream) {
  return together(comm, stream, {input, output}, [=](const std::vector<Part>& parts) {
    reduce_parts(parts, {parts[static_cast<std::size_t>(root)].output}, 0, count,
                 reduction_of(type, op));
  });
}

Result ncclReduceScatter(const void* input, void* output, std::size_t count, DataType type,
                         RedOp op, Comm comm, Stream stream) {
  return together(comm, stream, {input, output}, [=](const std::vector<Part>& parts) {
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      reduce_parts(parts, {parts[rank].output}, rank * count * size_of(dtype_of(type)), count,
                   reduction_of(type, op));
    }
  });
}

Result ncclBroadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                     Comm comm, Stream stream) {
  const std::size_t bytes = count * size_of(dtype_of(type));
  return together(comm, stream, {input, output}, [=](const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      if (bytes > 0) std::memmove(part.output, parts[static_cast<std::size_t>(root)].input, bytes);
    }
  });
}

Result ncclAllGather(const void* input, void* output, std::size_t count, DataType type, Comm comm,
                     Stream stream) {
  const std::size_t bytes = count * size_of(dtype_of(type));
  return together(comm, stream, {input, output}, [=](const std::vector<Part>& parts) {
    for (const Part& to : parts) {
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        if (bytes == 0) continue;
        std::memmove(static_cast<std::byte*>(to.output) + rank * bytes, parts[rank].input, bytes);
      }
    }
  });
}

Result ncclSend(const void* data, std::size_t, DataType, int peer, Comm comm, Stream stream) {
  const std::pair way{comm->rank, peer};
  const long number = ++comm->sent[way];
  return note({comm, stream,
               [=](OpaqueComm& self) {
                 const std::scoped_lock lock(self.group->mutex);
                 self.group->mail[way].push_back(data);
                 self.group->changed.notify_all();
               },
               [=](OpaqueComm& self) {
                 std::unique_lock lock(self.group->mutex);
                 self.group->changed.wait(
                     lock, [&] { return self.group->taken[way] >= number || self.aborted; });
               }});
}

Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream) {
  const std::pair way{peer, comm->rank};
  const std::size_t bytes = count * size_of(dtype_of(type));
  return note({comm, stream, nullptr, [=](OpaqueComm& self) {
                 std::unique_lock lock(self.group->mutex);
                 auto& mail = self.group->mail[way];
                 self.group->changed.wait(lock, [&] { return !mail.empty() || self.aborted; });
                 if (mail.empty()) return;
                 std::memcpy(data, mail.front(), bytes);
                 mail.pop_front();
                 ++self.group->taken[way];
                 self.group->changed.notify_all();
               }});
}

Result ncclGroupStart() {
  ++group_depth;
  return Result::kSuccess;
}

Result ncclGroupEnd() { return --group_depth > 0 ? Result::kSuccess : launch(); }
}
