#!/bin/bash
# prepare.sh FOLDER SEED: the data, the cold-started model and the pretrained critic of a seed, in the folder of the
# repository. What is there is not made again.
set -euo pipefail
folder=$1 seed=$2
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-.venv/bin/python}
fields=(examples/key_chain/config.yaml "run.seed=$seed" "run.root=$folder" parallel.tensor=1
	"data.train=$folder/data/train-4.jsonl" "data.evaluate=$folder/data/evaluate-4.jsonl"
	"data.demonstrations=$folder/data/demonstrations.jsonl")
made() { [ -e "$folder/$1/config.json" ]; }

"$python" examples/key_chain/build_keys.py --output "$folder/data" --seed "$seed"
made model || "$python" -m megatron_stppo cold-start "${fields[@]}" "model.path=$folder/data/model" "cold_start.output=$folder/model"
if ! made critic; then
	rm -rf "$folder/played"
	"$python" -m megatron_stppo rollout "${fields[@]}" "model.path=$folder/model" run.name=played run.iterations=16
	"$python" -m megatron_stppo cold-start "${fields[@]}" "model.path=$folder/model" --critic "$folder/played" "cold_start.output=$folder/critic"
fi
