"""What all HTTP servers of this project share (process, gate, deadlines, metrics), and what their clients share."""
