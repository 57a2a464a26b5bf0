# Shared by scripts/train_common.sh and scripts/phases_common.sh, which source it.

fail() { echo "error: $*" >&2; exit 2; } # as the trainer does for a wrong setting

# For settings that may be a list of files: a comma in a path separates nothing.
quoted() { printf "'%s'" "${1//\'/\\\'}"; }
