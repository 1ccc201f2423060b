# SPDX-License-Identifier: Apache-2.0
"""The page: timelines and flight-recorder dumps, drawn as one HTML file.

Open first: `document`.
"""
