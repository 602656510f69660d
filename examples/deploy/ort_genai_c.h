// The functions of onnxruntime-genai that run.cpp calls, with the declarations of the file of this name in its release:
// use that file where you have it. The package of pip has the library, but no header.
#pragma once
#include <stddef.h>
#include <stdint.h>
struct OgaResult;  // an error; null if there is none
struct OgaModel;
struct OgaTokenizer;
struct OgaTokenizerStream;
struct OgaSequences;
struct OgaGeneratorParams;
struct OgaGenerator;
extern "C" {
const char* OgaResultGetError(const OgaResult*);
OgaResult* OgaCreateModel(const char* folder, OgaModel**);
OgaResult* OgaCreateTokenizer(const OgaModel*, OgaTokenizer**);
OgaResult* OgaCreateTokenizerStream(const OgaTokenizer*, OgaTokenizerStream**);
OgaResult* OgaTokenizerStreamDecode(OgaTokenizerStream*, int32_t token, const char** text);
OgaResult* OgaCreateSequences(OgaSequences**);
OgaResult* OgaTokenizerEncode(const OgaTokenizer*, const char* text, OgaSequences*);
size_t OgaSequencesGetSequenceCount(const OgaSequences*, size_t sequence);
OgaResult* OgaCreateGeneratorParams(const OgaModel*, OgaGeneratorParams**);
OgaResult* OgaGeneratorParamsSetSearchNumber(OgaGeneratorParams*, const char* name, double value);
OgaResult* OgaCreateGenerator(const OgaModel*, const OgaGeneratorParams*, OgaGenerator**);
OgaResult* OgaGenerator_AppendTokenSequences(OgaGenerator*, const OgaSequences*);
bool OgaGenerator_IsDone(OgaGenerator*);
OgaResult* OgaGenerator_GenerateNextToken(OgaGenerator*);
OgaResult* OgaGenerator_GetNextTokens(const OgaGenerator*, const int32_t** tokens, size_t* count);
}
