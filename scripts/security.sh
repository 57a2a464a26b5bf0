#!/usr/bin/env bash
# Looks for insecure code (bandit; medium severity and above fails) and for pinned packages with known vulnerabilities
# (pip-audit). Exit status: 0 nothing found, 1 something found, 2 the packages could not be checked.
#   bash scripts/security.sh
# Both tools go into a throw-away environment: the run time needs neither. Needs a package index, and for pip-audit the
# vulnerability service of pypi.org.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TOOLS=(bandit==1.9.4 pip-audit==2.10.1)
LOCKS=(requirements/*.lock)

fail() { echo "error: $2" >&2; exit "$1"; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/tools"
python=$folder/tools/bin/python
"$python" -m pip install -q --disable-pip-version-check "${TOOLS[@]}" || fail 2 "the tools could not be installed"

printf '== bandit\n'
insecure=0
"$python" -m bandit -q -c pyproject.toml --severity-level medium -r verl search_r1 scripts infer.py long_task.py program_end.py text_file.py url_text.py || insecure=1

# Reads a report, prints what was found in it. Exit status: 1 vulnerable packages, 2 not every package was looked up.
# pip-audit itself calls a package that its database does not answer for skipped, and ends well.
READ_REPORT='
import json, sys
packages = json.load(open(sys.argv[1]))["dependencies"]
skipped = [package["name"] for package in packages if "skip_reason" in package]
vulnerable = [package for package in packages if package.get("vulns")]
for package in vulnerable:
    for found in package["vulns"]:
        print(package["name"], package["version"], found["id"], "fixed in", ", ".join(found["fix_versions"]) or "none")
print(f"{len(packages) - len(skipped)} of {len(packages)} packages looked up, {len(vulnerable)} vulnerable")
sys.exit(1 if vulnerable else 2 if skipped or not packages else 0)
'

vulnerable=0 unchecked=()
for lock in "${LOCKS[@]}"; do
  printf '== pip-audit %s\n' "$lock"
  "$python" -m pip_audit --no-deps --disable-pip --progress-spinner off -r "$lock" -f json -o "$folder/report" \
    2>"$folder/log" || true
  found=0
  if [[ -s $folder/report ]]; then
    "$python" -c "$READ_REPORT" "$folder/report" || found=$?
  else
    found=2
    tail -3 "$folder/log"
  fi
  case "$found" in 0) ;; 1) vulnerable=1 ;; *) unchecked+=("$lock") ;; esac
  rm -f "$folder/report"
done

((insecure == 0)) || echo "error: bandit found insecure code (above); change it, or say why not: # nosec ID # reason" >&2
((vulnerable == 0)) || echo "error: packages with known vulnerabilities (above); raise their pins" >&2
if ((insecure || vulnerable)); then exit 1; fi
((${#unchecked[@]} == 0)) ||
  fail 2 "not every package of ${unchecked[*]} could be looked up (no network to pypi.org?); the code itself is fine"
