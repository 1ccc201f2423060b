#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"

namespace torch_ring {

namespace {

std::size_t host_memory_bytes() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

void commit_pages(int fd, std::size_t offset, std::size_t bytes) {
  constexpr std::size_t kAtOnce = 256u << 10;  // bytes: a call that a signal interrupts is undone
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(kAtOnce, bytes - done);
    const int error =
        ::posix_fallocate(fd, static_cast<off_t>(offset + done), static_cast<off_t>(part));
    if (error == EINTR) continue;
    if (error != 0) {
      errno = error;
      throw_errno("cannot get " + std::to_string(bytes) +
                  " bytes of shared memory: posix_fallocate");
    }
    done += part;
  }
}

}  // namespace

Fd SharedMemory::create(std::size_t arena_bytes) {
  Fd fd(::memfd_create("torch_ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("memfd_create");
  const std::size_t bytes =
      huge_page_ceil(kArena + (arena_bytes != 0 ? arena_bytes : host_memory_bytes()));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_errno("ftruncate");
  // Seal the size: if a process shrank the file, its readers would get SIGBUS.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) throw_errno("F_ADD_SEALS");
  commit_pages(fd.get(), 0, kWorldEntries);
  commit_pages(fd.get(), kStaging, kSegments * kSegmentBytes);
  return fd;
}

SharedMemory::SharedMemory(Fd fd) : fd_(std::move(fd)) {
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) throw_errno("fstat");
  bytes_ = static_cast<std::size_t>(status.st_size);
  if (bytes_ < kArena || bytes_ % kHugePage != 0 ||
      (::fcntl(fd_.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorKind::kInternal, "a descriptor of the host is not torch_ring's memory");
  }
  base_ = map_at_huge_page(bytes_, 0, PROT_NONE);
  if (base_ == nullptr) throw_errno("mmap of " + std::to_string(bytes_) + " bytes");
  if (::mmap(base_, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
             fd_.get(), 0) != base_) {
    const int error = errno;
    ::munmap(base_, bytes_);
    errno = error;
    throw_errno("mmap of a memfd");
  }
  ::madvise(base_, bytes_, MADV_DONTDUMP);
}

SharedMemory::~SharedMemory() { ::munmap(base_, bytes_); }

void SharedMemory::commit(std::size_t offset, std::size_t bytes) const {
  commit_pages(fd_.get(), offset, bytes);
}

void SharedMemory::commit_huge(std::size_t offset, std::size_t bytes) const {
  try {
    if (has_huge_pages_) {
      for (std::size_t at = 0; at < bytes; at += kHugePage) {
        commit(offset + at, 1);
      }
      has_huge_pages_ = make_huge_pages(base_ + offset, bytes);
    }
    commit(offset, bytes);  // the rest of the pages
  } catch (...) {
    release(offset, bytes);
    throw;
  }
}

void SharedMemory::release(std::size_t offset, std::size_t bytes) const noexcept {
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

}  // namespace torch_ring
