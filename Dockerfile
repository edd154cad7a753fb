# An image with the packages and the repository, for machines with NVIDIA GPUs. It has not been built yet.
#   docker build -t gpt2-repro .
#   docker run --gpus all --shm-size 16g -v "$PWD/data:/app/data" -v "$PWD/runs:/app/runs" gpt2-repro \
#       accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 1 train.py
# Pass keys when the container starts, for example `docker run --env HF_TOKEN`. The image contains none.
FROM python:3.11.13-slim-bookworm

# git: for the commit in environment.json. curl: for tiny Shakespeare. g++: for torch.compile and the ops of DeepSpeed.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# The packages are installed before the code is copied, so that a change of the code does not install them again.
COPY requirements.txt requirements.lock ./
RUN pip install --requirement requirements.lock

COPY . .
CMD ["python", "-m", "gpt2_repro.preflight"]
