#!/bin/sh
# Run an agent on another machine. Its requests return through an SSH tunnel to the endpoint on this one.
#
#     environment.command=[examples/agents/remote.sh, HOST, my-agent, ARGUMENT]
#
# The key of the episode is sent over the standard input, because everyone can read the words of a command.
# SSH gives a session its own environment, so my-agent gets OPENAI_BASE_URL and OPENAI_API_KEY only. If the
# port THERE is not free on HOST, the episode ends with the outcome "error".
set -eu
host=$1
shift
here=${OPENAI_BASE_URL#http://127.0.0.1:} # PORT/NAME/v1
there=$((20000 + $$ % 12000))
begin="read -r OPENAI_API_KEY; export OPENAI_API_KEY OPENAI_BASE_URL=http://127.0.0.1:$there/${here#*/}"
{ printf '%s\n' "$OPENAI_API_KEY" && cat; } |
    # shellcheck disable=SC2086 # options for ssh, separated by spaces
    ssh ${SSH_OPTIONS-} -o BatchMode=yes -o ExitOnForwardFailure=yes \
        -R "127.0.0.1:$there:127.0.0.1:${here%%/*}" "$host" "$begin; exec $*"
