// ControlPlane: a process's connections with the other ranks, beside the data: who lives, who has
// left, who has failed; and the listeners through which data connections are made when needed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/fd.h"
#include "transport/handshake.h"
#include "transport/socket_source.h"

namespace torch_ring {

/// Learns what happens to the ranks of one process set. The plane's thread calls it (subscribe()
/// too, for what has happened before); it must not block, nor call the plane.
class ControlObserver {
 public:
  virtual ~ControlObserver() = default;
  /// `rank` of the world has died, or is silent. `how`: "rank 3 (pid 7) died: its ...", or, from
  /// another rank, "rank 1 (pid 5) says that rank 3 (pid 7) died: ...".
  virtual void on_lost(int rank, const std::string& how) = 0;
  /// `rank` of the world has left in peace.
  virtual void on_departed(int rank) = 0;
  /// `rank` of the world has given the set up.
  virtual void on_failed(int rank, ErrorKind kind, const std::string& why) = 0;
  /// A data connection of the set is there: a SocketSource::take() may succeed now.
  virtual void on_connected() = 0;
};

/// One per process, for all of its process sets. It has one thread, which sleeps in poll().
///
/// The ranks form a Chord ring (I. Stoica et al., "Chord: a scalable peer-to-peer lookup service",
/// SIGCOMM 2001) in the order of hosts: each has connections to the ranks at distances 1, 2, 4, ...
/// in both directions, 2 log2(n) of them at most. News is flooded through it: each rank passes on,
/// once, what it hears first. When a rank is lost, its neighbours on the ring connect to the next
/// living ones, so the survivors stay connected.
///
/// Thread: any. Blocking: stop() only.
class ControlPlane {
 public:
  struct Address {
    std::string socket;  // the name of its abstract Unix socket, without the leading zero byte
    std::string host;    // a numeric IPv4 or IPv6 address; used between hosts
    std::uint16_t port = 0;
  };
  struct Options {
    int rank = 0;
    std::vector<int> host_of;         // rank -> host; ranks of one host use Unix sockets
    std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
    std::vector<Address> addresses;   // by rank
    Key key{};
    Fd unix_listener;  // bound and listening; none where no rank shares the host
    Fd tcp_listener;   // none on one host
    std::chrono::milliseconds heartbeat_timeout{60'000};
  };

  /// Starts the thread, which begins to connect to the neighbours.
  explicit ControlPlane(Options options);
  ~ControlPlane() { stop(); }
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  /// The neighbours to which there is no connection yet; empty when the plane is complete.
  /// Errors: Error(kPeerLost) if a rank has exited, Error of the handshake if it has another key.
  std::vector<int> missing() const;

  /// Says goodbye, joins the thread and closes all connections.
  void stop();

  /// Tells `observer` of the ranks `members`, until unsubscribe() returns. What happened before is
  /// told at once. `set`: the set's number, the same on all ranks, never used twice.
  void subscribe(std::uint64_t set, std::vector<int> members, ControlObserver& observer);
  /// Also closes the set's data connections that nobody has taken.
  void unsubscribe(std::uint64_t set);

  /// Tells the other ranks that this one has given a set up. Blocking: no.
  void fail(std::uint64_t set, const Error& cause);

  /// The data sockets of a set: `width` to each peer. `members`: its ranks in the world, by their
  /// rank in the set. The plane must outlive it.
  std::unique_ptr<SocketSource> sockets(std::uint64_t set, std::vector<int> members, int width);

  /// The plane's descriptors: a forked child closes them, or no peer would notice this process's
  /// death while the child lives.
  std::vector<int> descriptors() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace torch_ring
