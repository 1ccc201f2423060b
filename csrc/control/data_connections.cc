#include "control/data_connections.h"

#include <algorithm>

#include "control/set_numbers.h"
#include "core/at.h"

namespace torch_ring {

bool DataConnections::connect(std::uint64_t set, int peer, int width) {
  if (closed_.contains(set)) return false;
  Pair& pair = pairs_[{set, peer}];
  if (!pair.outgoing.empty() || !pair.ready.empty()) return false;
  const bool unix = at(options_.host_of, peer) == at(options_.host_of, options_.rank);
  for (int channel = 1; channel <= width; ++channel) {
    const Hello hello{static_cast<std::uint32_t>(options_.rank), static_cast<std::uint32_t>(peer),
                      set, static_cast<std::uint32_t>(channel)};
    pair.outgoing.emplace_back(at(options_.addresses, peer), unix, options_.key, hello);
  }
  return true;
}

bool DataConnections::accept(const Hello& hello, Fd socket) {
  if (hello.channel > kChannels || closed_.contains(hello.set)) return false;
  auto& ready = pairs_[{hello.set, static_cast<int>(hello.from)}].ready;
  // A second one of a name replaces the first: the peer has given that up.
  if (!ready.contains(hello.channel) && untaken_ >= kUntaken) return false;
  untaken_ += ready.insert_or_assign(hello.channel, std::move(socket)).second;
  return true;
}

std::vector<Fd> DataConnections::take(std::uint64_t set, int peer, int width) {
  const auto found = pairs_.find({set, peer});
  if (found == pairs_.end()) return {};
  Pair& pair = found->second;
  if (pair.error) {
    const Error error = *pair.error;
    pairs_.erase(found);
    throw error;
  }
  if (pair.ready.size() < static_cast<std::size_t>(width)) return {};
  std::vector<Fd> sockets;
  for (auto& [channel, socket] : pair.ready) sockets.push_back(std::move(socket));
  if (!connects(set, options_.rank, peer)) untaken_ -= sockets.size();
  taken_ += sockets.size();
  pairs_.erase(found);
  return sockets;
}

std::vector<std::uint64_t> DataConnections::advance(const PollSet& polls, Clock::time_point now) {
  std::vector<std::uint64_t> sets;
  for (auto& [name, pair] : pairs_) {
    if (pair.outgoing.empty()) continue;
    try {
      std::erase_if(pair.outgoing, [&](Outgoing& outgoing) {
        if (outgoing.advance(polls, now) != Outgoing::State::kDone) {
          return pair.gone && outgoing.fd() < 0;
        }
        pair.ready.emplace(outgoing.hello().channel, outgoing.take());
        return true;
      });
    } catch (const Error& error) {
      pair.outgoing.clear();
      pair.ready.clear();
      pair.error = Error(error.kind(), "no connection to " + at(options_.labels, name.second) +
                                           ": " + error.what());
    }
    if (pair.outgoing.empty()) sets.push_back(name.first);
  }
  return sets;
}

void DataConnections::forget(int peer) {
  for (auto& [name, pair] : pairs_) {
    if (name.second != peer) continue;
    pair.gone = true;
    std::erase_if(pair.outgoing, [](const Outgoing& outgoing) { return outgoing.fd() < 0; });
  }
}

bool DataConnections::is_connecting(std::uint64_t set, int peer) const {
  const auto found = pairs_.find({set, peer});
  return found != pairs_.end() && !found->second.outgoing.empty();
}

void DataConnections::close(std::uint64_t set) {
  closed_.insert(set);
  std::erase_if(pairs_, [&](const auto& item) {
    const auto& [name, pair] = item;
    if (name.first != set) return false;
    if (!connects(set, options_.rank, name.second)) untaken_ -= pair.ready.size();
    return true;
  });
}

void DataConnections::add_to(PollSet& polls) {
  for (auto& [name, pair] : pairs_) {
    for (Outgoing& outgoing : pair.outgoing) outgoing.add_to(polls);
  }
}

Clock::time_point DataConnections::due() const {
  auto due = Clock::time_point::max();
  for (const auto& [name, pair] : pairs_) {
    for (const Outgoing& outgoing : pair.outgoing) due = std::min(due, outgoing.due());
  }
  return due;
}

void DataConnections::append_descriptors(std::vector<int>& fds) const {
  for (const auto& [name, pair] : pairs_) {
    for (const auto& [channel, socket] : pair.ready) fds.push_back(socket.get());
    for (const Outgoing& outgoing : pair.outgoing) fds.push_back(outgoing.fd());
  }
}

}  // namespace torch_ring
