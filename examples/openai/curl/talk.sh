#!/bin/sh
# Asks a gateway as OpenAI is asked: prints the answer while it is spoken, has the question spoken, and, where a model draws, drawn.
#
# Needs curl and jq.
# sh talk.sh http://127.0.0.1:8000/v1 "A red circle on blue." [MODEL]
set -eu
url=$1 question=$2
events=$(mktemp)
trap 'rm -f "$events"' EXIT

ask() { # PATH [JQ PROGRAM that makes the body of $question and $model]
    path=$1
    shift
    [ $# -eq 0 ] || set -- --data "$(jq --null-input --arg question "$question" --arg model "$model" "$1")"
    curl --silent --show-error --no-buffer "$url/$path" \
        --header "Authorization: Bearer ${OPENAI_API_KEY:-nobody}" --header 'Content-Type: application/json' "$@"
}

# What each of them gives stands beside what OpenAI tells of a model.
models=$(ask models)
model=${3:-$(printf %s "$models" | jq --raw-output 'first(.data[] | select(.outputs | index("audio"))).id')}

# Server-sent events: a line of JSON behind "data: ". An error before the first one is JSON alone.
ask chat/completions '{model: $model, stream: true, messages: [{role: "user", content: $question}],
                       modalities: ["text", "audio"], audio: {voice: "alloy", format: "pcm16"}}' |
    sed --unbuffered 's/^data: //; /^\[DONE\]$/d' | tee "$events" |
    jq --unbuffered --join-output 'if .error then "error: \(.error.code): \(.error.message)\n" | halt_error(1) else
                                   .choices[0].delta.audio.transcript // empty end'
echo

# 16 bit, little-endian, mono, 24,000 samples a second: ffplay -f s16le -ar 24000 -ac 1 answer.pcm
jq --raw-output '.choices[0].delta.audio.data // empty' "$events" | while read -r piece; do
    printf %s "$piece" | base64 --decode
done > answer.pcm

ask audio/speech '{model: "tts-1", voice: "alloy", input: $question, response_format: "wav"}' > speech.wav

if printf %s "$models" | jq --exit-status 'any(.data[].outputs[]; . == "image")' > /dev/null; then
    ask images/generations '{model: "gpt-image-1", prompt: $question}' | jq --raw-output '.data[0].b64_json' | base64 --decode > picture.png
fi
