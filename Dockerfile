# embodyrl with every simulator; docs/docker.md says how to use it.
#     docker build -t embodyrl .
ARG BASE=python:3.12-slim-trixie
FROM ${BASE}

# What the base lacks: make; tini, which passes signals on and reaps what workers leave behind; a compiler for
# run.compile; and OpenGL and Vulkan without a screen, where there is no GPU in software.
RUN apt-get update && \
    apt-get install -y --no-install-recommends make tini g++ \
        libegl1 libgles2 libopengl0 libgl1 libegl-mesa0 libgl1-mesa-dri mesa-vulkan-drivers && \
    rm -rf /var/lib/apt/lists/*

# Where NVIDIA's driver is found. Its libraries come from the host with --gpus; these files often do not.
RUN mkdir -p /usr/share/glvnd/egl_vendor.d /usr/share/vulkan/icd.d && \
    printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s"}}\n' \
        libEGL_nvidia.so.0 >/usr/share/glvnd/egl_vendor.d/10_nvidia.json && \
    printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.194"}}\n' \
        libGLX_nvidia.so.0 >/usr/share/vulkan/icd.d/nvidia_icd.json
ENV NVIDIA_DRIVER_CAPABILITIES=all

# Any user may write the home folder and the working folder, so `--user` needs no preparation.
RUN useradd --uid 1000 --create-home embodyrl && \
    chmod 1777 /home/embodyrl && \
    mkdir -m 1777 /work && \
    install -d -o embodyrl /opt/embodyrl
USER embodyrl
WORKDIR /opt/embodyrl

# The packages, with an empty embodyrl: this layer is made anew only if the lock file or the setup changes.
COPY --chown=embodyrl requirements requirements
COPY --chown=embodyrl scripts/setup.sh scripts/install_vulkan.sh scripts/first_imports.py scripts/
COPY --chown=embodyrl pyproject.toml Makefile LICENSE ./
RUN export HOME=/tmp/build UV_NO_CACHE=1 && \
    mkdir embodyrl && echo '__version__ = "0"' >embodyrl/__init__.py && touch README.md && \
    scripts/setup.sh && \
    rm -rf /tmp/build

COPY --chown=embodyrl README.md ./
COPY --chown=embodyrl embodyrl embodyrl
# Logs and locks in /tmp would belong to this user, and stop others.
RUN HOME=/tmp/build UV_NO_CACHE=1 make setup && rm -rf /tmp/*

# A user without an entry in /etc/passwd has a name and a home folder all the same.
ENV HOME=/home/embodyrl USER=embodyrl PATH=/opt/embodyrl/.venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["tini", "--", "embodyrl"]
CMD ["--help"]
