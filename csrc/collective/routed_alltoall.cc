#include "collective/routed_alltoall.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "collective/plan.h"

namespace torch_ring {

namespace {

/// What one rank sends to another.
struct Parcel {
  int from;
  int to;
  auto operator<=>(const Parcel&) const = default;
};

/// The parcels that a rank has, one after the other in `data`.
struct Held {
  std::vector<Parcel> parcels;
  std::vector<std::byte> data;
};

/// One alltoall of all ranks, on its way.
class Delivery {
 public:
  Delivery(const Routes& routes, int rank, std::span<const std::size_t> bytes)
      : routes_(routes), rank_(rank), size_(routes.size()), bytes_(bytes) {}

  int size() const { return size_; }
  std::size_t bytes_of(Parcel parcel) const {
    return bytes_[static_cast<std::size_t>(parcel.from * size_ + parcel.to)];
  }

  /// Hop number `hop`, from 1, among the `members` of `communicator`, in its order.
  Held run(int hop, Communicator& communicator, const std::vector<int>& members,
           const Held& held) const {
    std::map<Parcel, const std::byte*> place;
    const std::byte* at = held.data.data();
    for (const Parcel parcel : held.parcels) {
      place[parcel] = at;
      at += bytes_of(parcel);
    }

    Held sent;
    Held received;
    std::vector<std::size_t> matrix;
    for (const int sender : members) {
      for (const int receiver : members) {
        std::size_t sum = 0;
        for (const Parcel parcel : passed_on(hop, sender, receiver)) {
          sum += bytes_of(parcel);
          if (receiver == rank_) received.parcels.push_back(parcel);
          if (sender != rank_) continue;
          const std::byte* const data = place.at(parcel);
          sent.data.insert(sent.data.end(), data, data + bytes_of(parcel));
        }
        matrix.push_back(sum);
      }
    }
    std::size_t sum = 0;
    for (const Parcel parcel : received.parcels) sum += bytes_of(parcel);
    received.data.resize(sum);
    communicator.alltoall(sent.data.data(), received.data.data(), matrix);
    return received;
  }

 private:
  /// What `sender` passes on to `receiver`, in an order that both know.
  std::vector<Parcel> passed_on(int hop, int sender, int receiver) const {
    std::vector<Parcel> parcels;
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        if (routes_.holder(from, to, hop - 1) == sender &&
            routes_.holder(from, to, hop) == receiver) {
          parcels.push_back({from, to});
        }
      }
    }
    return parcels;
  }

  const Routes& routes_;
  const int rank_;
  const int size_;
  const std::span<const std::size_t> bytes_;
};

}  // namespace

int Routes::size() const {
  std::size_t size = 0;
  for (const auto& ranks : ranks_of_host) size += ranks.size();
  return static_cast<int>(size);
}

int Routes::host_of(int rank) const {
  const auto has = [&](const auto& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  return static_cast<int>(std::find_if(ranks_of_host.begin(), ranks_of_host.end(), has) -
                          ranks_of_host.begin());
}

int Routes::index_of(int rank) const {
  const auto& ranks = ranks_of_host[static_cast<std::size_t>(host_of(rank))];
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

int Routes::holder(int from, int to, int hops) const {
  if (hops == 0) return from;
  if (hops == kHops) return to;
  const int host = host_of(hops == 1 ? from : to);
  return ranks_of_host[static_cast<std::size_t>(host)]
                      [static_cast<std::size_t>(index_of(to) % lanes)];
}

void routed_alltoall(const Routes& routes, int rank, Communicator& host, Communicator* lane,
                     const void* input, void* output, std::span<const std::size_t> bytes) {
  const Delivery delivery(routes, rank, bytes);
  const std::vector<int>& neighbours =
      routes.ranks_of_host[static_cast<std::size_t>(routes.host_of(rank))];
  std::vector<int> lane_ranks;
  for (const auto& ranks : routes.ranks_of_host) {
    if (lane) lane_ranks.push_back(ranks[static_cast<std::size_t>(routes.index_of(rank))]);
  }

  Held held;
  std::size_t sum = 0;
  for (int to = 0; to < delivery.size(); ++to) {
    held.parcels.push_back({rank, to});
    sum += delivery.bytes_of(held.parcels.back());
  }
  held.data.assign(static_cast<const std::byte*>(input),
                   static_cast<const std::byte*>(input) + sum);

  held = delivery.run(1, host, neighbours, held);
  if (lane) held = delivery.run(2, *lane, lane_ranks, held);
  held = delivery.run(3, host, neighbours, held);

  const std::vector<Range> places = ranges_of(column_of(bytes, delivery.size(), rank));
  const std::byte* at = held.data.data();
  for (const Parcel parcel : held.parcels) {
    const Range place = places[static_cast<std::size_t>(parcel.from)];
    if (place.count > 0) {
      std::memcpy(static_cast<std::byte*>(output) + place.begin, at, place.count);
    }
    at += place.count;
  }
}

}  // namespace torch_ring
