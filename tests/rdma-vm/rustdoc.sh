#!/usr/bin/env bash
# The pinned stable rustdoc with its unstable features.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
