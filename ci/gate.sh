#!/usr/bin/env bash
# Runs the benchmarks of one kind, for the action ci/gate: gate.sh cpu, or gate.sh h100 for an emulated one. TESTS, ARGUMENTS and
# RECORD are inputs of that action. Reports, summaries and a patch with recorded baselines go to gputrain-out.
set -euo pipefail
kind=$1
mkdir -p gputrain-out
read -ra tests <<< "$TESTS"
read -ra arguments <<< "$ARGUMENTS"
run=(pytest "${tests[@]}" -n 2 "--gpu-platform=$kind" "--gpu-json=gputrain-out/$kind.json" "--gpu-summary=gputrain-out/$kind.md")
[ "$kind" = cpu ] || run+=(--gpu-emulate)
[ "$RECORD" != true ] || run+=(--gpu-baseline-update)
status=0
HF_HUB_OFFLINE=1 "${run[@]}" "${arguments[@]}" || status=$?
if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -f "gputrain-out/$kind.md" ]; then
  cat "gputrain-out/$kind.md" >> "$GITHUB_STEP_SUMMARY"
fi
if [ "$RECORD" = true ]; then
  git add --all -- '*baselines/*.json'
  git diff --cached --binary > gputrain-out/recorded.patch
fi
exit "$status"
