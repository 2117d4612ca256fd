#!/usr/bin/env bash
# Runs the benchmarks of one kind, for the action ci/gate: gate.sh cpu, or gate.sh h100 for an emulated one. TESTS, ARGUMENTS,
# BASELINES and RECORD are inputs of that action. Reports, summaries and a patch with recorded baselines go to gputrain-out.
set -euo pipefail
kind=$1
mkdir -p gputrain-out
echo "**$kind: the run ended before it could write a summary; the job has its log.**" > "gputrain-out/$kind.md"
read -ra tests <<< "$TESTS"
read -ra arguments <<< "$ARGUMENTS"
run=(pytest "${tests[@]}" -n 2 "--gpu-platform=$kind" "--gpu-json=gputrain-out/$kind.json" "--gpu-summary=gputrain-out/$kind.md"
  "--junitxml=gputrain-out/$kind.xml")
[ "$kind" = cpu ] || run+=(--gpu-emulate)
[ "$RECORD" != true ] || run+=(--gpu-baseline-update)
status=0
HF_HUB_OFFLINE=1 "${run[@]}" "${arguments[@]}" || status=$?
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
  cat "gputrain-out/$kind.md" >> "$GITHUB_STEP_SUMMARY"
fi
if [ "$RECORD" = true ]; then
  git add --all -- "*$BASELINES/*.json" || true  # pytest has said why there is none
  git diff --cached --binary > gputrain-out/recorded.patch
fi
exit "$status"
