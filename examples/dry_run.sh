# Sourced by the examples beside it where DRY_RUN=1: a tiny model, few prompts and one place each for
# trainer and engine stand in, so that every flag is read and the loop runs, on any machine.
# $1: the family of the tiny model. Sets model, data, place and size.
model=$out/model data=$out/prompts.jsonl
mkdir -p "$out"
[ -d "$model" ] || "$python" -m vireo tiny "$1" "$model" --size test
if [ "${1#qwen2_5_vl}" != "$1" ]; then
  [ -d "$out/shapes" ] || "$python" -m vireo data shapes "$out/shapes" --rows 40
  data=$out/shapes/train.json
else
  for i in 1 2 3 4 5 6; do
    echo "{\"prompt\": \"What is $i + $i? End with a line Answer: N\", \"label\": \"$((i + i))\"}"
  done > "$data"
fi
case " ${place[*]} " in
  *" --colocate "*) place=(--actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate) ;;
  *) place=(--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1) ;;
esac
size=(--rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 8
  --num-rollout 2 --max-tokens-per-gpu 512 --engine serve)
