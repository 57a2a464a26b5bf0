"""What every HTTP server of this project is made of: process, gate, deadlines, metrics; and what its clients need."""
