#!/usr/bin/env bash
# Latent to text on one node or several, with or without GPUs. ONE variable chooses the version:
#
#   bash train_qwen_english_l2t_stable.sh                          # stable (default)
#   TRAIN_VERSION=original bash train_qwen_english_l2t_stable.sh   # the original loop, losses and configuration
#
# Everything else is a variable too; further arguments are Hydra overrides and win:
#   NPROC_PER_NODE=2 LEARNING_RATE=3e-5 bash train_qwen_english_l2t_stable.sh training.num_train_steps=100
set -euo pipefail
cd "$(dirname "$0")"

TRAIN_VERSION=${TRAIN_VERSION:-stable}
case "$TRAIN_VERSION" in
  stable) SCRIPT=latentDLM_mmdit/train_mmdit_stable.py; CONFIG=mmdit_stable; LR=5e-5; CLIP=0.5; LATENT=0.1; ACCUM=2; WARMUP=2000 ;;
  original) SCRIPT=latentDLM_mmdit/train_mmdit.py; CONFIG=mmdit; LR=1e-4; CLIP=1.0; LATENT=1.0; ACCUM=1; WARMUP=100 ;;
  *) echo "TRAIN_VERSION=$TRAIN_VERSION is not known; use stable or original." >&2; exit 2 ;;
esac

PYTHON=${PYTHON:-python}
FOUND=$("$PYTHON" -c 'import platform, stepguard, torch
print(torch.accelerator.device_count(), "python", platform.python_version(), "torch", torch.__version__, "stepguard", stepguard.__version__)')
GPUS=${FOUND%% *}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
NPROC_PER_NODE=${NPROC_PER_NODE:-$([ "$GPUS" -gt 0 ] && echo "$GPUS" || echo 2)}
L2T_CONFIG=${L2T_CONFIG:-$CONFIG}
L2T_TRAIN_BS=${L2T_TRAIN_BS:-4}
LEARNING_RATE=${LEARNING_RATE:-$LR}
GRAD_CLIP_NORM=${GRAD_CLIP_NORM:-$CLIP}
WARMUP_STEPS=${WARMUP_STEPS:-$WARMUP}
LATENT_LOSS_WEIGHT=${LATENT_LOSS_WEIGHT:-$LATENT}
GRAD_ACCUM_STEPS=${GRAD_ACCUM_STEPS:-$ACCUM}
DTYPE=${DTYPE:-bf16}
DATA_SOURCE=${DATA_SOURCE:-toy}
RUN_NAME=${RUN_NAME:-mmdit-qwen-32d-l2t-$TRAIN_VERSION}
LOG_FOLDER=${LOG_FOLDER:-train_logs}

# What can be seen before anything starts
[ -f "configs/$L2T_CONFIG.yaml" ] || { echo "configs/$L2T_CONFIG.yaml does not exist; set L2T_CONFIG." >&2; exit 2; }
if [ "$GPUS" -gt 0 ] && [ "$NPROC_PER_NODE" -gt "$GPUS" ]; then
  echo "NPROC_PER_NODE=$NPROC_PER_NODE, but there are $GPUS GPUs." >&2; exit 2
fi
if [ "$DATA_SOURCE" = real ] && [ ! -d data/real/tokens ]; then
  echo "data/real/tokens does not exist; make it with: python real_glosses.py" >&2; exit 2
fi
if [ "$NNODES" -gt 1 ] && [ "$NODE_RANK" -gt 0 ] && ! timeout 30 bash -c "until (exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT) 2>/dev/null; do sleep 1; done"; then
  echo "nobody answers at $MASTER_ADDR:$MASTER_PORT; start node 0 first, or set MASTER_ADDR and MASTER_PORT." >&2; exit 2
fi
echo "${FOUND#* }"
echo "version $TRAIN_VERSION: $SCRIPT, $GPUS GPUs, $NNODES nodes with $NPROC_PER_NODE processes each"

if [ "$NNODES" -eq 1 ]; then
  MEET=(--standalone)
else
  MEET=(--node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
fi
mkdir -p "$LOG_FOLDER"
LOG=$LOG_FOLDER/train_$(date +%Y%m%d-%H%M%S)_node$NODE_RANK.log
"$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --nproc_per_node="$NPROC_PER_NODE" "${MEET[@]}" "$SCRIPT" \
  --config-name "$L2T_CONFIG" \
  loss.loss_type=l2t \
  logging.run_name="$RUN_NAME" \
  data.source="$DATA_SOURCE" \
  training.train_batch_size="$L2T_TRAIN_BS" \
  training.gradient_accumulation_steps="$GRAD_ACCUM_STEPS" \
  training.warmup_steps="$WARMUP_STEPS" \
  training.dtype="$DTYPE" \
  optimizer.lr="$LEARNING_RATE" \
  optimizer.grad_clip_norm="$GRAD_CLIP_NORM" \
  loss.latent_loss_weight="$LATENT_LOSS_WEIGHT" \
  "$@" 2>&1 | tee "$LOG"
