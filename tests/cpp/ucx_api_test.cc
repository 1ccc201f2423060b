// SPDX-License-Identifier: Apache-2.0
// Compares ucx/api.h with UCX's header, if there is one (UCX_INCLUDE in the Makefile).
#include "ucx/api.h"

#if __has_include(<ucp/api/ucp.h>)
#include <ucp/api/ucp.h>

#include <cstddef>

namespace torch_ring::test::ucx_api_test {

namespace {

using namespace ucx;

static_assert(sizeof(Status) == sizeof(ucs_status_t));
static_assert(kOk == UCS_OK && kInProgress == UCS_INPROGRESS && kBusy == UCS_ERR_BUSY);
static_assert(kCanceled == UCS_ERR_CANCELED && kLastError == UCS_ERR_LAST);

static_assert(offsetof(Params, fields) == offsetof(ucp_params_t, field_mask));
static_assert(offsetof(Params, features) == offsetof(ucp_params_t, features));
static_assert(sizeof(Params) >= sizeof(ucp_params_t));
static_assert(Params::kFeatures == UCP_PARAM_FIELD_FEATURES);
static_assert(Params::kTag == UCP_FEATURE_TAG && Params::kWakeup == UCP_FEATURE_WAKEUP);

static_assert(offsetof(WorkerParams, fields) == offsetof(ucp_worker_params_t, field_mask));
static_assert(offsetof(WorkerParams, thread_mode) == offsetof(ucp_worker_params_t, thread_mode));
static_assert(sizeof(WorkerParams) >= sizeof(ucp_worker_params_t));
static_assert(WorkerParams::kThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(WorkerParams::kSerialized == UCS_THREAD_MODE_SERIALIZED);

static_assert(offsetof(EndpointParams, fields) == offsetof(ucp_ep_params_t, field_mask));
static_assert(offsetof(EndpointParams, address) == offsetof(ucp_ep_params_t, address));
static_assert(offsetof(EndpointParams, error_mode) == offsetof(ucp_ep_params_t, err_mode));
static_assert(offsetof(EndpointParams, on_error) == offsetof(ucp_ep_params_t, err_handler.cb));
static_assert(offsetof(EndpointParams, argument) == offsetof(ucp_ep_params_t, err_handler.arg));
static_assert(sizeof(EndpointParams) >= sizeof(ucp_ep_params_t));
static_assert(EndpointParams::kAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
static_assert(EndpointParams::kErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
static_assert(EndpointParams::kErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(EndpointParams::kPeer == UCP_ERR_HANDLING_MODE_PEER);

static_assert(offsetof(TransportEntry, name) == offsetof(ucp_transport_entry_t, transport_name));
static_assert(offsetof(TransportEntry, device) == offsetof(ucp_transport_entry_t, device_name));
static_assert(offsetof(EndpointAttributes, fields) == offsetof(ucp_ep_attr_t, field_mask));
static_assert(offsetof(EndpointAttributes, transports) ==
              offsetof(ucp_ep_attr_t, transports.entries));
static_assert(offsetof(EndpointAttributes, count) ==
              offsetof(ucp_ep_attr_t, transports.num_entries));
static_assert(offsetof(EndpointAttributes, transport_bytes) ==
              offsetof(ucp_ep_attr_t, transports.entry_size));
static_assert(sizeof(EndpointAttributes) >= sizeof(ucp_ep_attr_t));
static_assert(EndpointAttributes::kTransports == UCP_EP_ATTR_FIELD_TRANSPORTS);

static_assert(offsetof(RequestParams, fields) == offsetof(ucp_request_param_t, op_attr_mask));
static_assert(offsetof(RequestParams, flags) == offsetof(ucp_request_param_t, flags));
static_assert(sizeof(RequestParams) >= sizeof(ucp_request_param_t));
static_assert(RequestParams::kFlags == UCP_OP_ATTR_FIELD_FLAGS);
static_assert(RequestParams::kForce == UCP_EP_CLOSE_FLAG_FORCE);

static_assert(offsetof(MessageInfo, tag) == offsetof(ucp_tag_recv_info_t, sender_tag));
static_assert(offsetof(MessageInfo, bytes) == offsetof(ucp_tag_recv_info_t, length));
static_assert(sizeof(MessageInfo) == sizeof(ucp_tag_recv_info_t));

}  // namespace
}  // namespace torch_ring::test::ucx_api_test
#endif
