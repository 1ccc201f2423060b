"""The page: timelines and flight-recorder dumps, drawn as one HTML file.

Open first: `document`.
"""
