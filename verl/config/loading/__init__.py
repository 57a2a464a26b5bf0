"""From files and a command line to a typed configuration."""
