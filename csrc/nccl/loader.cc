#include "nccl/loader.h"

#include <dlfcn.h>

#include "core/error.h"

namespace torch_ring::nccl {

namespace {

constexpr const char* kSoname = "libnccl.so.2";

void* open(const std::string& path) {
  if (path.empty()) {
    // torch's copy first: two copies of NCCL in a process would not know of each other.
    if (void* library = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  const char* name = path.empty() ? kSoname : path.c_str();
  if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  throw Error(ErrorKind::kInvalidArgument,
              std::string("tensors on GPUs need NCCL, which cannot be loaded: ") + dlerror() +
                  ". Install a build of torch with CUDA, or say where NCCL is "
                  "(TORCH_RING_NCCL_LIBRARY)");
}

class Symbols {
 public:
  Symbols(void* library, std::string path) : library_(library), path_(std::move(path)) {}

  template <class Function>
  void get(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (function) return;
    throw Error(ErrorKind::kInvalidArgument, path_ + " has no " + name + ": it is not NCCL " +
                                                 version_text(kOldestVersion) + " or newer");
  }

 private:
  void* library_;
  std::string path_;
};

std::string path_of(void* symbol, const std::string& otherwise) {
  Dl_info info{};
  return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : otherwise;
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 10'000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Api load(const std::string& path) {
  void* library = open(path);
  Api api{};
  api.path = path_of(dlsym(library, "ncclGetVersion"), path.empty() ? kSoname : path);

  const Symbols symbols(library, api.path);
  symbols.get(api.get_version, "ncclGetVersion");
  if (api.get_version(&api.version) != Result::kSuccess || api.version < kOldestVersion) {
    throw Error(ErrorKind::kInvalidArgument, api.path + " is NCCL " + version_text(api.version) +
                                                 "; " + version_text(kOldestVersion) +
                                                 " or newer is needed");
  }
  symbols.get(api.get_unique_id, "ncclGetUniqueId");
  symbols.get(api.get_error_string, "ncclGetErrorString");
  symbols.get(api.get_last_error, "ncclGetLastError");
  symbols.get(api.comm_init_rank_config, "ncclCommInitRankConfig");
  symbols.get(api.comm_get_async_error, "ncclCommGetAsyncError");
  symbols.get(api.comm_finalize, "ncclCommFinalize");
  symbols.get(api.comm_destroy, "ncclCommDestroy");
  symbols.get(api.comm_abort, "ncclCommAbort");
  symbols.get(api.all_reduce, "ncclAllReduce");
  symbols.get(api.broadcast, "ncclBroadcast");
  symbols.get(api.reduce, "ncclReduce");
  symbols.get(api.all_gather, "ncclAllGather");
  symbols.get(api.reduce_scatter, "ncclReduceScatter");
  symbols.get(api.send, "ncclSend");
  symbols.get(api.recv, "ncclRecv");
  symbols.get(api.group_start, "ncclGroupStart");
  symbols.get(api.group_end, "ncclGroupEnd");
  return api;
}

}  // namespace torch_ring::nccl
